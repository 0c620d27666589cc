"""The ablations' runner: every row for each seed, once, and a table that compares with the base."""

from __future__ import annotations

import fcntl
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipstream.config import Recipe
from slipstream.recipe import recipe_as_toml
from support.scripts import load
from support.tiny_run import make_inputs, tiny_recipe

quality = load("quality", "benchmarks")

PLAN = """
recipe = "recipe.toml"
minutes = 0.02
settings = { "training.log_every" = 1 }
[[rows]]
name = "base"
seeds = [0, 1]
[[rows]]
name = "one layer"
settings = { "drafter.layers" = 1, "training.preflight" = false }
[[rows]]
name = "cannot be"
settings = { "drafter.layers" = 0 }
"""


def test_first_seeds_come_first_and_parts_share_the_work(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(PLAN, encoding="utf-8")
    plan = quality.read_plan(tmp_path / "plan.toml")
    assert [t[:2] for t in quality.trainings(plan)] == [("base", 0), ("one layer", 0), ("cannot be", 0), ("base", 1)]
    assert plan["recipe"] == str(tmp_path / "recipe.toml")
    settings = {"a.b": True, "a.c": [1, 2], "a.d": "x"}
    assert quality.arguments(settings) == ["--a.b", "true", "--a.c", "1", "2", "--a.d", "x"]


@pytest.mark.parametrize("bad", [PLAN.replace('"base"', '"other"'), PLAN.replace('"one layer"', '"base"')])
def test_a_plan_without_a_base_or_with_one_name_twice_is_refused(tmp_path: Path, bad: str) -> None:
    (tmp_path / "plan.toml").write_text(bad, encoding="utf-8")
    with pytest.raises(SystemExit, match="names of their own"):
        quality.read_plan(tmp_path / "plan.toml")


def test_rows_are_trained_once_and_one_that_cannot_be_costs_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = make_inputs(tmp_path)
    recipe: Recipe = tiny_recipe(
        root, root / "unused", data__heldout=root / "heldout.jsonl", training__preflight="false", training__steps=2
    )
    (tmp_path / "recipe.toml").write_text(recipe_as_toml(recipe), encoding="utf-8")
    (tmp_path / "plan.toml").write_text(PLAN, encoding="utf-8")
    arguments = ["quality", str(tmp_path / "plan.toml"), "--out", str(tmp_path / "out")]
    monkeypatch.setattr("sys.argv", [*arguments, "--part", "1/2"])
    quality.main()
    results = tmp_path / "out" / "results.jsonl"
    assert [json.loads(line)["name"] for line in results.read_text(encoding="utf-8").splitlines()] == ["base"]
    monkeypatch.setattr("sys.argv", arguments)
    quality.main()
    told = capsys.readouterr()
    assert "cannot be, seed 0: drafter.layers is 0" in told.err
    rows = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    assert [(r["name"], r["seed"]) for r in rows] == [("base", 0), ("one layer", 0), ("base", 1)]
    assert all(r["prompts"] == 3 and r["tau"] >= 1 and r["steps"] >= 1 for r in rows)
    assert "| base | 2 |" in told.out
    assert "| one layer | 1 |" in told.out


def test_time_begins_when_the_first_steps_are_done_and_only_one_process_trains_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_inputs(tmp_path)
    recipe: Recipe = tiny_recipe(
        root, root / "unused", data__heldout=root / "heldout.jsonl", training__preflight="false",
        training__evaluate_every=0, training__evaluate_prompts=0, training__epochs=1000.0,
    )  # fmt: skip
    recipe = replace(recipe, training=replace(recipe.training, steps=0))  # epochs that the time does not allow
    (tmp_path / "recipe.toml").write_text(recipe_as_toml(recipe), encoding="utf-8")
    (tmp_path / "plan.toml").write_text(PLAN.replace("seeds = [0, 1]", ""), encoding="utf-8")
    turn = tmp_path / "turn"
    other = quality.Turn(turn)
    other.take()
    holding: list[float] = []
    real = quality.Turn.take

    def take(self: object) -> None:  # the process that trained before lets go a while after this one has come to ask
        holding.append(time.monotonic())
        time.sleep(0.3)
        other.give()
        real(self)
        with pytest.raises(BlockingIOError):
            fcntl.flock(other._file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    compiled: list[int] = []
    step = quality.Trainer.train_step

    def slow_at_first(self: Any) -> None:  # compiling takes longer than all the training that is asked for
        if not compiled:
            time.sleep(2.0)
        compiled.append(1)
        step(self)

    monkeypatch.setattr(quality.Trainer, "train_step", slow_at_first)
    monkeypatch.setattr(quality.Turn, "take", take)
    monkeypatch.setattr(quality, "FIRST_STEPS", 3)
    monkeypatch.setattr(
        "sys.argv",
        ["quality", str(tmp_path / "plan.toml"), "--out", str(tmp_path / "out"), "--part", "1/3", "--turn", str(turn)],
    )
    quality.main()
    (row,) = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    assert len(holding) == 1
    assert row["steps"] > 3
    assert row["training_seconds"] < 0.02 * 60 + 0.3
    assert row["other_seconds"] >= 0.3
    fcntl.flock(other._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # it has been given back


def test_the_table_compares_with_the_base() -> None:
    def row(name: str, tau: float) -> dict[str, object]:
        return {"name": name, "tau": tau, "epoch": 2.0, "steps": 10, "acceptance_by_position": [0.5, 0.25]}

    text = quality.table([row("base", 2.0), row("other", 2.25), row("base", 2.1)])
    assert "| base | 2 | 2.050 (2.000, 2.100) |  | 10 | 2.0 | 0.50 0.25 |" in text
    assert "| other | 1 | 2.250 | +0.200 |" in text


@pytest.mark.parametrize("name", ["embedded", "smollm2"])
def test_the_plans_rows_are_recipes(name: str) -> None:
    plan = quality.read_plan(quality.Path(quality.__file__).with_name(f"quality_{name}.toml"))
    for row, seed, settings in quality.trainings(plan):
        recipe = quality.load_recipe(plan["recipe"], quality.arguments(settings | {"run.seed": seed}))
        assert recipe.training.max_minutes > 0, row
