"""run.json: what it holds, and that it is written whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream import provenance


def test_run_ids_are_unique_and_sort_by_time():
    ids = [provenance.new_run_id() for _ in range(20)]
    assert len(set(ids)) == 20
    assert ids[0][:15] <= ids[-1][:15]


def test_start_record_is_json_with_versions_seed_and_torch_build(tmp_path: Path):
    import torch

    record = provenance.start_record(["slipstream", "train", "r.toml"], seed=7, device="cpu")
    provenance.write_json(tmp_path / "run.json", record)
    read = json.loads((tmp_path / "run.json").read_text())
    assert read == record
    assert read["argv"] == ["slipstream", "train", "r.toml"]
    assert read["seeds"] == {"run": 7}
    assert read["torch"]["version"] == torch.__version__
    assert read["torch"]["git_commit"] == torch.version.git_version
    assert set(read["versions"]) >= {"python", "torch", "transformers", "triton", "slipstream"}
    assert read["gpu"] is None
    assert read["host"]
    assert read["resumed"] == []


def test_git_state_of_a_repository_and_outside_one(tmp_path: Path):
    assert provenance.git_state(tmp_path) is None
    run = lambda *args: subprocess.run(  # noqa: E731
        ["git", "-c", "user.name=a", "-c", "user.email=a@b.invalid", *args],
        cwd=tmp_path,
        check=True,
        capture_output=True,
    )
    run("init")
    assert provenance.git_state(tmp_path) is None, "a repository without a commit has no commit"
    (tmp_path / "file").write_text("1")
    run("add", "file")
    run("commit", "-m", "first")
    state = provenance.git_state(tmp_path)
    assert state is not None
    assert len(state["commit"]) == 40
    assert state["modified"] is False
    (tmp_path / "file").write_text("2")
    assert provenance.git_state(tmp_path)["modified"] is True


def test_atomic_write_keeps_the_old_file_and_leaves_no_half_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "run.json"
    provenance.write_json(path, {"a": 1})

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        provenance.write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"]


def test_importing_provenance_loads_no_torch():
    code = "import sys, slipstream.provenance; sys.exit('torch' in sys.modules)"
    source = str(Path(provenance.__file__).parents[1])
    assert subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": source}).returncode == 0


def test_a_device_is_written_to_and_not_replaced(tmp_path):
    import os
    import threading

    from slipstream.provenance import write_json

    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    write_json(pipe, {"a": 1})
    reader.join()
    assert '"a": 1' in read[0]
    assert not pipe.is_file()
