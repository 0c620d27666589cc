"""Bit rot and edited files: a checkpoint that was changed is never resumed quietly, and each fault is one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from slipstream.config import Recipe, RunConfig
from slipstream.errors import CheckpointError, TrainingError
from slipstream.training import checkpoint as ck
from slipstream.training.directory import RunDirectory
from slipstream.training.metrics import cut_after, last_line

FILES = ("drafter/model.safetensors", "optimizer.safetensors", "state.safetensors", "state.json", "drafter/config.json")


def write_drafter(path: Path) -> None:
    path.mkdir()
    save_file({"fc.weight": torch.ones(8, 8)}, path / "model.safetensors")
    (path / "config.json").write_text("{}")


def save(directory: Path, step: int, keep: int = 5) -> Path:
    state = ck.TrainingState(
        step=step, elapsed=1.0, tokens=3, run_id="r", identity={"seed": 0}, tensors={"w": torch.ones(3)}
    )
    return ck.save_checkpoint(
        directory, state, write_drafter=write_drafter, optimizer={"exp_avg.a": torch.ones(4) * step}, keep=keep
    )


def flip(path: Path) -> None:
    """Flip the lowest bit of the last byte but one: of a tensor's mantissa, or of a JSON file's end."""
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("file", FILES)
def test_one_flipped_bit_is_found_and_named(tmp_path: Path, file: str):
    path = save(tmp_path, 1)
    flip(path / file)
    with pytest.raises(CheckpointError, match="step-1 is damaged") as caught:
        ck.read_checkpoint(path)
    assert file in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("file", FILES)
def test_the_next_older_whole_one_is_used_and_said(tmp_path: Path, file: str):
    save(tmp_path, 1)
    flip(save(tmp_path, 2) / file)
    said: list[str] = []
    assert ck.latest_checkpoint(tmp_path, said.append) == tmp_path / "step-1"
    assert len(said) == 1
    for part in ("step-2", file, "damaged"):
        assert part in said[0]
    flip(tmp_path / "step-1" / file)
    assert ck.latest_checkpoint(tmp_path) is None


def test_a_damaged_newer_checkpoint_never_crowds_out_the_new_ones_and_is_replaced(tmp_path: Path):
    save(tmp_path, 1)
    flip(save(tmp_path, 3) / "optimizer.safetensors")
    save(tmp_path, 2, keep=1)
    assert ck.latest_checkpoint(tmp_path) == tmp_path / "step-2"
    save(tmp_path, 3, keep=1)
    assert ck.latest_checkpoint(tmp_path) == tmp_path / "step-3"
    assert ck.read_checkpoint(tmp_path / "step-3")[0].step == 3


def rewrite(path: Path, change: dict[str, Any]) -> None:
    """Edit ``state.json`` and make the marker agree, as a careful editor would."""
    record = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps({**record, **change}))
    marker = json.loads((path / "COMPLETE").read_text())
    (path / "COMPLETE").write_text(json.dumps({**marker, "files": ck._files(path), "sha256": ck._digests(path)}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("step", "x"), ("step", -1), ("step", True), ("step", 2.5), ("elapsed", "x"), ("elapsed", None),
        ("tokens", []), ("run_id", 4), ("identity", None), ("identity", []), ("more", 1), ("format", None),
    ],
)  # fmt: skip
def test_values_of_the_wrong_kind_in_state_are_one_line(tmp_path: Path, key: str, value: object):
    path = save(tmp_path, 1)
    rewrite(path, {key: value})
    with pytest.raises(CheckpointError) as caught:
        ck.read_checkpoint(path)
    assert "step-1" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["[]", "3", "null", "not json", '{"run_id": 3, "resumed": []}'])
def test_a_state_file_that_is_no_object(tmp_path: Path, text: str):
    path = save(tmp_path, 1)
    (path / "state.json").write_text(text)
    rewritten = {**json.loads((path / "COMPLETE").read_text()), "files": ck._files(path), "sha256": ck._digests(path)}
    (path / "COMPLETE").write_text(json.dumps(rewritten))
    with pytest.raises(CheckpointError, match="step-1"):
        ck.read_checkpoint(path)


@pytest.mark.parametrize("marker", ["[]", "3", '{"files": 3}', '{"files": {"state.json": 1}, "sha256": 3}'])
def test_a_marker_of_another_shape_is_not_trusted(tmp_path: Path, marker: str):
    path = save(tmp_path, 1)
    (path / "COMPLETE").write_text(marker)
    assert not ck.is_complete(path)
    assert ck.latest_checkpoint(tmp_path) is None


def test_the_first_checkpoint_says_that_there_is_none_and_small_sizes_are_in_mib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    real = ck.shutil.disk_usage
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("U", (), {"free": 8})())
    with pytest.raises(CheckpointError, match=r"it needs 0\.0\d+ MiB and 0\.0\d* MiB are free") as caught:
        save(tmp_path, 1)
    assert "older" not in str(caught.value)
    assert "--resume" not in str(caught.value)
    assert "no checkpoint" in str(caught.value)
    monkeypatch.setattr("shutil.disk_usage", real)
    save(tmp_path, 1)
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("U", (), {"free": 8})())
    with pytest.raises(CheckpointError, match=r"step-1 is intact.*--resume"):
        save(tmp_path, 2)


def made(tmp_path: Path, **options: Any) -> RunDirectory:
    run = RunDirectory(tmp_path / "run")
    with run:
        run.create(Recipe(), ["x"], device="cpu", **options)
    return run


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("run.json", "[]"),
        ("run.json", "3"),
        ("run.json", "{}"),
        ("run.json", '{"resumed": []}'),
        ("run.json", '{"run_id": 7, "resumed": []}'),
        ("run.json", '{"run_id": "a", "resumed": 5}'),
        ("run.json", "\x00"),
        ("recipe.toml", "run = 5"),
        ("recipe.toml", "run = "),
    ],
)
def test_edited_run_files_are_one_line(tmp_path: Path, file: str, text: str):
    run = made(tmp_path)
    (run.path / file).write_text(text)
    with pytest.raises(CheckpointError, match="cannot be resumed") as caught:
        run.reopen(Recipe(), ["x"], device="cpu", step=1, identity={})
    assert file in str(caught.value)
    assert "\n" not in str(caught.value)
    assert (run.path / file).read_text() == text


@pytest.mark.parametrize("name", ["n" * 300, "a\0b"])
def test_a_name_that_no_disk_takes_is_one_line(tmp_path: Path, name: str):
    path = tmp_path / name
    for call in ("refuse_existing", "require_existing", "lock"):
        with pytest.raises(TrainingError) as caught:
            getattr(RunDirectory(path), call)()
        assert "run.directory" in str(caught.value)
        assert "\n" not in str(caught.value)
        assert "\0" not in str(caught.value)
    with RunDirectory(path) as run, pytest.raises(TrainingError):
        run.create(Recipe(run=RunConfig()), [], device="cpu")


def test_the_identity_is_in_run_json_and_stays_there(tmp_path: Path):
    identity = {"target.digest": "aa", "drafter.target_layer_ids": (1, 2), "data.key": "k"}
    run = made(tmp_path, identity=identity)
    expected = {**identity, "drafter.target_layer_ids": [1, 2]}
    assert json.loads((run.path / "run.json").read_text())["identity"] == expected
    record = json.loads((run.path / "run.json").read_text())
    del record["identity"]
    (run.path / "run.json").write_text(json.dumps(record))
    run.reopen(Recipe(), ["x"], device="cpu", step=1, identity=identity)
    assert json.loads((run.path / "run.json").read_text())["identity"] == expected


def test_metrics_that_are_a_directory_are_one_line(tmp_path: Path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(TrainingError, match=r"metrics\.jsonl cannot be read"):
        cut_after(tmp_path / "metrics.jsonl", 3)
    with pytest.raises(TrainingError, match=r"metrics\.jsonl cannot be read"):
        last_line(tmp_path / "metrics.jsonl", "train")


def test_edited_metrics_lines_are_moved_aside(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "train", "step": 1}\n{"step": 1}\n[]\n{"kind": "train", "step": "x"}\n3\n')
    assert cut_after(path, 2) == 4
    assert last_line(path, "train") == {"kind": "train", "step": 1}
