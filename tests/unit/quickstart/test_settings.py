"""Which recipe runs: a pair's own, with its files found, from scratch or from what is shipped."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream import pairs
from slipstream.config import EvaluationConfig, Recipe
from slipstream.errors import ConfigError
from slipstream.quickstart.settings import Choice, packaged_recipe, pair_of, quickstart_recipe, shipped_settings
from support.tiny_pair import write_pair


@pytest.mark.parametrize("pair", pairs.pairs())
def test_the_recipe_names_files_that_are_there(pair: str) -> None:
    recipe = quickstart_recipe(Choice(pair=pair))
    assert recipe.run.directory == "runs/quickstart"
    assert pair_of(recipe) == pair
    assert 0 < recipe.training.max_minutes <= 4
    assert recipe.evaluation.max_prompts >= 60
    for name in (*recipe.data.train, *recipe.data.heldout):
        assert Path(name).is_file()


@pytest.mark.parametrize("pair", pairs.pairs())
def test_training_and_heldout_prompts_are_disjoint(pair: str) -> None:
    from slipstream.data.conversations import read_conversations

    recipe = quickstart_recipe(Choice(pair=pair))
    asked = [{c.messages[-2].content for c in read_conversations(recipe.data.train)}]
    asked.append({c.messages[-1].content for c in read_conversations(recipe.data.heldout)})
    assert len(asked[0]) >= 1500
    assert len(asked[1]) >= 60
    assert not asked[0] & asked[1]


def test_overrides_change_it_and_typos_are_refused() -> None:
    assert quickstart_recipe(overrides=["--target.path", "elsewhere"]).target.path == "elsewhere"
    with pytest.raises(ConfigError, match=r"Did you mean training\.max_minutes"):
        quickstart_recipe(overrides=["--training.max_minute", "1"])


def test_from_shipped_takes_the_drafters_shape_and_a_smaller_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pairs, "_ROOT", write_pair(tmp_path))
    assert pairs.pairs() == ("embedded",)
    scratch, shipped = (quickstart_recipe(Choice(start=start)) for start in ("scratch", "shipped"))
    assert (scratch.drafter.layers, scratch.drafter.block_size, scratch.drafter.warm_start) == (1, 4, None)
    assert (shipped.drafter.layers, shipped.drafter.block_size) == (2, 6)
    assert shipped.drafter.warm_start == str(tmp_path / "embedded" / "drafter")
    assert shipped.training.learning_rate == scratch.training.learning_rate / 4
    assert shipped.training.muon_learning_rate == scratch.training.muon_learning_rate / 4
    assert shipped.data == scratch.data


def test_the_shipped_drafters_block_is_found_by_measurement_unless_one_is_named() -> None:
    assert shipped_settings(Recipe(), 8) == [
        "--evaluation.draft_whole_block", "true", "--evaluation.compare_block_sizes", "5", "8",
    ]  # fmt: skip
    assert shipped_settings(Recipe(), 3) == []
    assert shipped_settings(Recipe(evaluation=EvaluationConfig(block_size=4)), 8) == []
    assert shipped_settings(Recipe(evaluation=EvaluationConfig(compare_block_sizes=(4, 6))), 8) == []


def test_a_pair_without_a_drafter_cannot_be_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = tmp_path / "smollm2"
    pair.mkdir()
    (pair / "recipe.toml").write_text('[target]\npath = "smollm2"\n', encoding="utf-8")
    monkeypatch.setattr(pairs, "_ROOT", tmp_path)
    with pytest.raises(ConfigError, match="no drafter is shipped with smollm2; start from scratch"):
        quickstart_recipe(Choice(start="shipped"))
    assert pair_of(packaged_recipe()) == "smollm2"
    assert pair_of(Recipe()) is None
    with pytest.raises(ValueError, match="embedded is not a pair; the pairs are smollm2"):
        pairs.pair_directory("embedded")
    assert pairs.drafter_path("smollm2") == Path("smollm2")
