"""What a resume, and a start, say about damage, deleted files, full disks and odd limits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from slipstream.errors import CheckpointError, TrainingError
from slipstream.training.plan import plan
from support.tiny_run import lines, make_inputs, quiet_train, tiny_recipe


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("damage"))


SETTINGS = {"training__steps": 3, "training__checkpoint_every": 1, "training__keep_checkpoints": 2}


@pytest.fixture(scope="module")
def finished(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("finished") / "run"
    quiet_train(tiny_recipe(root, run, **SETTINGS))
    return run


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "run")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("file", ["drafter/model.safetensors", "optimizer.safetensors"])
def test_a_flipped_bit_falls_back_and_then_refuses(root: Path, run: Path, finished: Path, file: str):
    flip(run / "checkpoints/step-3" / file)
    _, output = quiet_train(tiny_recipe(root, run, **SETTINGS), resume=True)
    assert f"step-3 is damaged: {file}" in output
    assert "resumed from" in output
    assert "step-2: step 2" in output
    mended, right = (place / "checkpoints/step-3" / file for place in (run, finished))
    assert mended.read_bytes() == right.read_bytes(), "the step was run again, to the bit"
    for step in (2, 3):
        flip(run / f"checkpoints/step-{step}" / file)
    with pytest.raises(CheckpointError, match="holds no complete checkpoint") as caught:
        quiet_train(tiny_recipe(root, run, **SETTINGS), resume=True)
    assert file in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_identity_outlives_the_checkpoints(root: Path, run: Path):
    state = json.loads((run / "checkpoints/step-3/state.json").read_text())
    assert json.loads((run / "run.json").read_text())["identity"] == state["identity"]
    assert {"target.digest", "tokenizer.digest", "data.key", "drafter.mask_token_id", "drafter.block_size"} <= set(
        state["identity"]
    )
    quiet_train(tiny_recipe(root, run, **SETTINGS), resume=True)
    assert json.loads((run / "run.json").read_text())["identity"] == state["identity"]


def test_deleted_metrics_are_said(root: Path, run: Path):
    (run / "metrics.jsonl").unlink()
    _, output = quiet_train(tiny_recipe(root, run, **SETTINGS), resume=True)
    assert "metrics.jsonl is gone" in output


@pytest.mark.parametrize(
    ("file", "text"),
    [("run.json", "[]"), ("run.json", '{"run_id": "r", "resumed": 5}'), ("recipe.toml", "run=5")],
)
def test_edited_run_files_are_one_line(root: Path, run: Path, file: str, text: str):
    (run / file).write_text(text)
    with pytest.raises(CheckpointError, match=file):
        quiet_train(tiny_recipe(root, run, **SETTINGS), resume=True)


def test_metrics_that_are_a_directory(root: Path, run: Path):
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").mkdir()
    with pytest.raises(TrainingError, match="cannot be read"):
        quiet_train(tiny_recipe(root, run, **SETTINGS), resume=True)


def test_no_room_for_a_checkpoint_is_said_before_anything_is_made(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("U", (), {"free": 2**17})())
    with pytest.raises(TrainingError, match=r"needs \d+\.\d+ MiB .* 0\.125 MiB are free") as caught:
        quiet_train(tiny_recipe(root, tmp_path / "a" / "run"))
    assert "run.directory" in str(caught.value)
    assert not (tmp_path / "a").exists()


def test_anchors_are_at_most_the_rows_length(root: Path, tmp_path: Path):
    recipe = tiny_recipe(root, tmp_path / "run", training__anchors=2**22, training__steps=1)
    shown = plan(recipe)
    assert "up to 160 anchors" in shown["step"]
    assert float(shown["memory: together"].split()[0]) < 10
    summary, output = quiet_train(recipe)
    assert summary.steps == 1
    assert "training.anchors is 4194304, more than a row's 160 tokens: 160 are used" in output


def test_a_time_limit_that_is_over_at_once_still_does_a_step(root: Path, tmp_path: Path):
    limits: dict[str, Any] = {"training__steps": 0, "training__epochs": 0, "training__max_minutes": 1e-9}
    summary, _ = quiet_train(tiny_recipe(root, tmp_path / "run", **limits))
    assert summary.steps == 1
    assert [row["step"] for row in lines(summary.directory)] == [1]
    assert (summary.drafter / "model.safetensors").is_file()
    again, _ = quiet_train(tiny_recipe(root, tmp_path / "run", **limits), resume=True)
    assert again.steps == 1
