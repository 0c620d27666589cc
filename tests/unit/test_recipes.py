"""The recipes that come with the project: they load, and each of their settings has its reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.recipe import load_recipe

RECIPES = sorted((Path(__file__).resolve().parents[2] / "recipes").glob("*.toml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_it_loads_and_names_its_target(path: Path) -> None:
    recipe = load_recipe(path)
    assert recipe.target.path
    assert recipe.data.train
    assert recipe.data.heldout


@pytest.mark.parametrize("path", [p for p in RECIPES if p.stem != "minimal"], ids=lambda p: p.stem)
def test_every_setting_has_its_reason_and_the_header_says_what_was_measured(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    header = " ".join(line for line in lines[: lines.index("[run]")])
    assert "Measured result" in header
    bare = [line for line in lines if " = " in line.partition("#")[0] and "#" not in line]
    above = {lines[i] for i in range(1, len(lines)) if lines[i - 1].startswith("#")}  # too long for one line
    assert not [line for line in bare if line not in above]
