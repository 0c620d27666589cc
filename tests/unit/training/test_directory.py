"""A run directory is claimed once and used by one process at a time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slipstream.config import Recipe, RunConfig, TrainingConfig
from slipstream.errors import CheckpointError, TrainingError
from slipstream.recipe import load_recipe
from slipstream.training.directory import RunDirectory


def test_create_writes_recipe_and_record(tmp_path: Path):
    recipe = Recipe(run=RunConfig(seed=3))
    with RunDirectory(tmp_path / "a" / "run") as run:
        run.refuse_existing()
        record = run.create(recipe, ["x"], device="cpu")
    assert load_recipe(run.path / "recipe.toml") == recipe
    assert json.loads((run.path / "run.json").read_text()) == record
    assert record["seeds"] == {"run": 3}


def test_two_processes_cannot_claim_or_use_one_directory(tmp_path: Path):
    with RunDirectory(tmp_path / "run") as one:
        one.create(Recipe(), [], device="cpu")
        with RunDirectory(tmp_path / "run") as two:
            with pytest.raises(TrainingError, match="in use by another process"):
                two.create(Recipe(), [], device="cpu")
            with pytest.raises(TrainingError, match="in use by another process"):
                two.lock()
    with RunDirectory(tmp_path / "run") as three:
        three.lock()  # free again
        with pytest.raises(TrainingError, match="not overwritten"):
            three.create(Recipe(), [], device="cpu")
        with pytest.raises(TrainingError, match="--resume"):
            three.refuse_existing()


def test_reopen_notes_the_resume_and_what_changed(tmp_path: Path):
    with RunDirectory(tmp_path / "run") as run:
        run.create(Recipe(), ["first"], device="cpu")
        record = run.reopen(Recipe(training=TrainingConfig(log_every=3)), ["second"], device="cpu", step=7)
    assert record["argv"] == ["first"]
    session = record["resumed"][0]
    assert (session["argv"], session["from_step"]) == (["second"], 7)
    assert session["changed_settings"] == {"training.log_every": [10, 3]}


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with RunDirectory(tmp_path / "file" / "run") as run, pytest.raises(TrainingError, match="cannot be made"):
        run.create(Recipe(), [], device="cpu")


def test_nothing_to_resume(tmp_path: Path):
    with RunDirectory(tmp_path / "run") as run, pytest.raises(CheckpointError, match="no run in"):
        run.require_existing()


def test_what_changed_around_a_run(tmp_path: Path):
    import torch

    with RunDirectory(tmp_path / "run") as run:
        record = run.create(Recipe(), [], device="cpu")
        assert record["device_name"]
        assert run.environment_changes("cpu") == []
        record["versions"] |= {"torch": "1.0", "transformers": "2.0", "datasets": "0.1"}  # the last moves no weight
        record |= {"threads": 999, "device_name": "an abacus"}
        (run.path / "run.json").write_text(json.dumps(record))
        changes = run.environment_changes("cpu")
        assert [c.split(" ")[0] for c in changes] == ["torch", "transformers", "threads", "device"]
        assert changes[2] == f"threads 999 -> {torch.get_num_threads()}"
        assert changes[3].startswith("device an abacus -> ")
        # What an earlier session did stays in the weights, though the last one was as this one.
        again = run.reopen(Recipe(), [], device="cpu", step=3)
        assert again["resumed"][0]["device_name"] != "an abacus"
        assert len(run.environment_changes("cpu")) == 4
        del record["device_name"]  # a run of an older version
        (run.path / "run.json").write_text(json.dumps(record))
        assert len(run.environment_changes("cpu")) == 3
        for damaged in ("", "[]", '{"versions": 3, "resumed": 4}', '{"resumed": [5]}'):
            (run.path / "run.json").write_text(damaged)
            assert run.environment_changes("cpu") == []  # reopen says what is wrong with it
