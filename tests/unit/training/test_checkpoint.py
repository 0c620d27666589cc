"""Checkpoints are whole or not there: killed saves, full disks, retention, identity."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from slipstream.errors import CheckpointError
from slipstream.training import checkpoint as ck


def state(step: int, **changes: object) -> ck.TrainingState:
    fields = {"step": step, "elapsed": step / 3, "tokens": step * 10, "run_id": "r", "identity": {"seed": 0}}
    return ck.TrainingState(**{**fields, "tensors": {"w": torch.full((3,), float(step))}, **changes})


def write_drafter(path: Path) -> None:
    path.mkdir()
    save_file({"fc.weight": torch.ones(64, 64)}, path / "model.safetensors")
    (path / "config.json").write_text("{}")


def save(directory: Path, step: int, keep: int = 2) -> Path:
    return ck.save_checkpoint(
        directory, state(step), write_drafter=write_drafter, optimizer={"exp_avg.a": torch.ones(4) * step}, keep=keep
    )


def names(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.iterdir())


def test_round_trip(tmp_path: Path):
    path = save(tmp_path, 7)
    assert path.name == "step-7"
    assert names(path) == ["COMPLETE", "drafter", "optimizer.safetensors", "state.json", "state.safetensors"]
    read, optimizer = ck.read_checkpoint(path)
    assert (read.step, read.elapsed, read.tokens, read.identity) == (7, 7 / 3, 70, {"seed": 0})
    assert torch.equal(read.tensors["w"], torch.full((3,), 7.0))
    assert torch.equal(optimizer["exp_avg.a"], torch.full((4,), 7.0))


def test_retention_keeps_the_newest_by_number(tmp_path: Path):
    for step in (8, 9, 10, 11):
        save(tmp_path, step, keep=2)
    assert names(tmp_path) == ["step-10", "step-11"]
    assert ck.latest_checkpoint(tmp_path) == tmp_path / "step-11"


def test_nothing_to_resume_from(tmp_path: Path):
    assert ck.latest_checkpoint(tmp_path / "absent") is None
    assert ck.latest_checkpoint(tmp_path) is None


@pytest.mark.parametrize("damage", ["no marker", "truncated", "missing file", "empty marker", "marker without files"])
def test_a_damaged_checkpoint_is_not_trusted_and_the_older_one_is_used(tmp_path: Path, damage: str):
    save(tmp_path, 1)
    bad = save(tmp_path, 2)
    if damage == "no marker":
        (bad / "COMPLETE").unlink()
    elif damage == "truncated":
        os.truncate(bad / "optimizer.safetensors", 5)
    elif damage == "missing file":
        (bad / "drafter" / "model.safetensors").unlink()
    elif damage == "empty marker":
        (bad / "COMPLETE").write_text("")
    else:
        (bad / "COMPLETE").write_text('{"files": {}}')
    assert ck.latest_checkpoint(tmp_path) == tmp_path / "step-1"
    with pytest.raises(CheckpointError, match="step-2 is incomplete"):
        ck.read_checkpoint(bad)
    save(tmp_path, 2)  # the run comes to that step again
    assert ck.latest_checkpoint(tmp_path) == tmp_path / "step-2"


def test_unreadable_contents_are_one_error(tmp_path: Path):
    path = save(tmp_path, 1)
    size = (path / "optimizer.safetensors").stat().st_size
    (path / "optimizer.safetensors").write_bytes(b"\xff" * size)
    with pytest.raises(CheckpointError, match=r"step-1 is damaged: optimizer\.safetensors"):
        ck.read_checkpoint(path)


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path[:0] = {paths!r}
import test_checkpoint as t
from slipstream.training import checkpoint as ck

def counted(module, name):
    real = getattr(module, name)
    def wrapper(*args, **kwargs):
        global calls
        calls += 1
        if calls == point:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)
    setattr(module, name, wrapper)

for point in range(1, int(sys.argv[2])):
    directory = Path(sys.argv[1], str(point))
    t.save(directory, 1)
    child = os.fork()
    if child == 0:
        calls = 0
        hooks = ((os, "fsync"), (os, "rename"), (os, "replace"), (ck, "save_file"), (t, "save_file"), (ck, "_files"))
        for module, name in hooks:
            counted(module, name)
        t.save(directory, 2, keep=1)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    print("killed" if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL else "survived", flush=True)
"""


def python(code: str, *arguments: str) -> list[str]:
    """Run code in another process that can import the package and this file; return its lines."""
    paths = [str(Path(__file__).parent), str(Path(ck.__file__).parents[2])]
    done = subprocess.run(
        [sys.executable, "-c", code.replace("{paths!r}", repr(paths)), *arguments], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_kill_during_a_save_never_leaves_a_checkpoint_that_resume_trusts(tmp_path: Path):
    """SIGKILL before each file, sync and rename of a save in turn; afterwards resume sees step 1 or a whole step 2."""
    ends = python(KILLED, str(tmp_path), "30")
    seen: list[int] = []
    for point in range(1, 30):
        directory = tmp_path / str(point)
        latest = ck.latest_checkpoint(directory)
        assert latest is not None, f"killed at point {point}: nothing to resume from"
        read, optimizer = ck.read_checkpoint(latest)
        assert torch.equal(optimizer["exp_avg.a"], torch.full((4,), float(read.step)))
        seen.append(read.step)
        save(directory, 3, keep=1)  # and the next save clears what the kill left
        assert names(directory) == ["step-3"]
    assert seen == sorted(seen), "once renamed, step 2 stays"
    assert seen[0] == 1
    assert seen[-1] == 2
    assert ends[0] == "killed"
    assert ends[-1] == "survived", "the points must reach past the end of a save"
    assert ends.count("killed") >= 15


@pytest.mark.parametrize("where", ["drafter", "optimizer", "sync", "marker", "rename"])
def test_full_disk_is_one_line_and_leaves_older_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
):
    save(tmp_path, 1)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fail(*_: object, **__: object) -> None:
        raise full

    drafter = write_drafter
    if where == "drafter":
        drafter = fail
    elif where == "optimizer":
        monkeypatch.setattr(ck, "save_file", fail)
    elif where == "sync":
        monkeypatch.setattr(os, "fsync", fail)
    elif where == "marker":
        monkeypatch.setattr(ck, "_files", fail)
    else:
        monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(CheckpointError, match="step-2 cannot be written: No space left on device; older") as caught:
        ck.save_checkpoint(tmp_path, state(2), write_drafter=drafter, optimizer={"a": torch.ones(2)}, keep=1)
    assert "\n" not in str(caught.value)
    assert names(tmp_path) == ["step-1"]
    assert ck.latest_checkpoint(tmp_path) == tmp_path / "step-1"


def test_a_real_write_failure_of_the_system(tmp_path: Path):
    """The kernel refuses to let any file grow past 4 KiB: the tensor writer meets it, not a patched Python function."""
    code = (
        "import signal, sys, resource; from pathlib import Path\n"
        "sys.path[:0] = {paths!r}\n"
        "import test_checkpoint as t\n"
        "from slipstream.errors import CheckpointError\n"
        "d = Path(sys.argv[1]); t.save(d, 1)\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "try:\n    t.save(d, 2)\n"
        "except CheckpointError as e:\n    print(e)\n"
    )
    lines = python(code, str(tmp_path / "c"))
    assert len(lines) == 1
    assert "step-2 cannot be written" in lines[0]
    assert names(tmp_path / "c") == ["step-1"]


def test_too_little_room_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("U", (), {"free": 8})())
    with pytest.raises(CheckpointError, match=r"needs 0\.000 MiB"):
        save(tmp_path, 1)
    assert names(tmp_path) == []


@pytest.mark.parametrize(("states", "mib"), [(("exp_avg", "exp_avg_sq"), 12), (("momentum_buffer",), 8)])
def test_the_room_that_is_asked_for_follows_the_optimizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, states: tuple[str, ...], mib: int
):
    """Two matrices, a million weights together: their optimizer's state, and the weights themselves."""
    optimizer = {f"{name}.layers.{n}.weight": torch.zeros(2**9, 2**10) for name in states for n in range(2)}
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("U", (), {"free": 8})())
    with pytest.raises(CheckpointError, match=rf"needs {mib}\.0 MiB"):
        ck.save_checkpoint(tmp_path, state(1), write_drafter=write_drafter, optimizer=optimizer, keep=1)


def test_other_errors_are_not_swallowed_and_leave_nothing(tmp_path: Path):
    def broken(_: Path) -> None:
        raise RuntimeError("a fault of ours")

    with pytest.raises(RuntimeError, match="fault of ours"):
        ck.save_checkpoint(tmp_path, state(1), write_drafter=broken, optimizer={}, keep=1)
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "before", "now"),
    [("target.digest", "aa", "bb"), ("tokenizer.digest", "t1", "t2"), ("drafter.block_size", 16, 8)],
)
def test_resume_refuses_a_difference_and_names_both_values(name: str, before: object, now: object):
    same = {"layers": (1, 2), "lr": 0.1}
    ck.check_identity({**same, name: before}, {**same, name: before}, Path("c/step-1"))
    with pytest.raises(CheckpointError) as caught:
        ck.check_identity({**same, name: before}, {**same, name: now}, Path("c/step-1"))
    for part in (name, repr(before), repr(now), "step-1", "run.directory"):
        assert part in str(caught.value)


def test_settings_that_an_older_checkpoint_does_not_name_are_what_it_did():
    old = {"target.digest": "aa", "training.loss": "decay"}
    current = {**old, "training.labels": "hard", "training.optimizer": "adamw"}
    ck.check_identity(old, current, Path("c/step-1"))
    ck.check_identity({"target.digest": "aa"}, {"target.digest": "aa"}, Path("c/step-1"))  # a part of it alone
    with pytest.raises(CheckpointError, match=r"training\.optimizer = 'adamw', this run has 'muon'; resume") as caught:
        ck.check_identity(old, {**current, "training.optimizer": "muon", "training.muon_momentum": 0.9}, Path("c/1"))
    assert "\n" not in str(caught.value)
    with pytest.raises(CheckpointError, match=r"training\.labels = 'hard', this run has 'soft'"):
        ck.check_identity(old, {**current, "training.labels": "soft"}, Path("c/1"))


def test_identity_survives_json(tmp_path: Path):
    identity = {"ids": (1, 2), "lr": 6e-4, "none": None}
    path = ck.save_checkpoint(tmp_path, state(1, identity=identity), write_drafter=write_drafter, optimizer={}, keep=1)
    read, _ = ck.read_checkpoint(path)
    ck.check_identity(read.identity, identity, path)
    assert json.loads((path / "state.json").read_text())["identity"]["ids"] == [1, 2]
