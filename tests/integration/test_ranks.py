"""Several processes train one drafter: the same trace as one, from one machine or two agents; failures end them all."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from slipstream.recipe import recipe_as_toml
from support.tiny_run import command, lines, make_inputs, tiny_recipe

TWO = ["--topology.targets", "cpu", "cpu", "--topology.drafters", "cpu", "cpu"]
FOUR = ["--topology.targets", *["cpu"] * 4, "--topology.drafters", *["cpu"] * 4]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a recipe of 20 steps of four micro-batches."""
    root = make_inputs(tmp_path_factory.mktemp("ranks"))
    recipe = tiny_recipe(
        root, root / "unused", training__accumulation=4, training__steps=20, training__preflight="false",
        training__checkpoint_every=10, training__keep_checkpoints=10, training__evaluate_every=0,
    )  # fmt: skip
    (root / "recipe.toml").write_text(recipe_as_toml(recipe), encoding="utf-8")
    return root


def begin(root: Path, run: str, *arguments: str, launcher: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """Start ``slipstream train`` of the recipe into ``run``."""
    _, environment = command([])
    words = [sys.executable, "-m", *launcher, *(("-m",) if launcher else ()), "slipstream", "train"]
    return subprocess.Popen(
        [*words, str(root / "recipe.toml"), "--run.directory", str(root / run), *arguments],
        env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip


def end(process: subprocess.Popen[str], timeout: float = 120) -> tuple[int, str, str]:
    """Wait for its end; return exit code, stdout and stderr. Nothing of it is left behind."""
    try:
        out, error = process.communicate(timeout=timeout)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, out, error


def trace(run: Path) -> list[tuple[int, float, float, int]]:
    return [(r["step"], r["loss"], r["grad_norm"], r["tokens"]) for r in lines(run)]


def same(found: list[Any], expected: list[Any]) -> None:
    assert [(step, tokens) for step, _, _, tokens in found] == [(step, tokens) for step, _, _, tokens in expected]
    for one, other in zip(found, expected, strict=True):
        assert one[1:3] == pytest.approx(other[1:3], rel=1e-6)


@pytest.fixture(scope="module")
def alone(root: Path) -> list[Any]:
    """Return the trace of one rank with all four micro-batches, in one process."""
    code, _, error = end(begin(root, "alone"))
    assert code == 0, error
    return trace(root / "alone")


def test_two_ranks_give_the_trace_of_one(root: Path, alone: list[Any]) -> None:
    code, out, error = end(begin(root, "two", *TWO))
    assert code == 0, error
    assert out.count("step 20/20") == 1  # the first rank alone tells
    same(trace(root / "two"), alone)


def test_target_threads_give_the_trace_of_one_and_say_who_waits(root: Path, alone: list[Any]) -> None:
    feeding = ["--topology.targets", "cpu", "cpu", "--topology.drafters", "cpu"]
    heldout = ["--data.heldout", str(root / "heldout.jsonl"), "--training.evaluate_every", "2"]
    code, _, error = end(begin(root, "fed", *feeding, *heldout))  # decoding does not disturb what is read ahead
    assert code == 0, error
    assert trace(root / "fed") == alone
    assert all(row["lossy"] == 0 for row in lines(root / "fed", "evaluation"))
    assert all(0 <= row["drafter_share_of_time"] <= 1 for row in lines(root / "fed"))


def test_two_agents_of_torchrun_give_the_trace_of_one(root: Path, alone: list[Any]) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    agents = [
        begin(
            root, "agents", "--topology.targets", "cpu", "--topology.drafters", "cpu",
            launcher=(
                "torch.distributed.run", "--nnodes", "2", "--node-rank", str(number), "--nproc-per-node", "1",
                "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "two",
            ),
        )
        for number in range(2)
    ]  # fmt: skip
    for agent in agents:
        code, _, error = end(agent)
        assert code == 0, error
    same(trace(root / "agents"), alone)


def test_four_ranks_go_on_from_what_two_have_saved(root: Path, alone: list[Any]) -> None:
    code, _, error = end(begin(root, "more", *TWO))
    assert code == 0, error
    for path in (root / "more/checkpoints/step-20").rglob("*.safetensors"):
        path.unlink()  # as if the run had been killed before: 10 is the newest that is whole
    code, out, error = end(begin(root, "more", "--resume", *FOUR))
    assert code == 0, error
    assert "resumed from" in out
    same(trace(root / "more"), alone)


def until_step(process: subprocess.Popen[str], run: Path, step: int) -> None:
    """Wait until a run that goes on has made a checkpoint of ``step``."""
    for _ in range(600):
        if (run / f"checkpoints/step-{step}/COMPLETE").exists():
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    raise AssertionError(f"no step {step}")


def workers(process: subprocess.Popen[str]) -> list[int]:
    """Return the ranks' process ids, from the file that names a process's children."""
    found = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text(encoding="utf-8")
    return [int(pid) for pid in found.split() if b"slipstream" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_a_killed_rank_ends_the_job_and_is_named(root: Path) -> None:
    process = begin(root, "killed", "--training.steps", "100000", *TWO)
    until_step(process, root / "killed", 10)
    ranks = workers(process)
    assert len(ranks) == 2
    os.kill(ranks[1], signal.SIGKILL)
    began = time.monotonic()
    code, _, error = end(process)
    assert time.monotonic() - began < 15
    assert code == 1
    assert error.splitlines()[-1].startswith("slipstream: rank 1 ")
    assert "SIGKILL" in error.splitlines()[-1]
    assert not [pid for pid in ranks if Path(f"/proc/{pid}").exists()]


def test_a_killed_rank_is_started_again_and_the_trace_is_that_of_a_run_without(root: Path, alone: list[Any]) -> None:
    process = begin(root, "again", "--max-restarts", "1", *TWO)
    until_step(process, root / "again", 10)
    for pid in workers(process)[:1]:
        os.kill(pid, signal.SIGKILL)
    code, out, error = end(process)
    assert code == 0, error
    if "resumed from" in out:  # else it had been faster than the kill
        record = json.loads((root / "again/run.json").read_text(encoding="utf-8"))
        assert record["resumed"]
    same(trace(root / "again"), alone)


def test_restarts_do_not_go_on_with_an_older_run(root: Path, alone: list[Any]) -> None:
    before = (root / "alone/metrics.jsonl").read_bytes()
    code, _, error = end(begin(root, "alone", "--max-restarts", "2", "--training.steps", "30", *TWO))
    assert code == 2
    assert "exists and is not overwritten" in error
    assert (root / "alone/metrics.jsonl").read_bytes() == before


def test_a_signal_saves_and_leaves(root: Path) -> None:
    process = begin(root, "stopped", "--training.steps", "100000", "--training.checkpoint_every", "10", *TWO)
    until_step(process, root / "stopped", 10)
    process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    code, out, error = end(process)
    assert time.monotonic() - began < 15
    assert code == 130
    assert "saved" in out
    assert "stopped by SIGTERM" in error
    step = int(out.rpartition("/step-")[2].split(";")[0])
    assert (root / f"stopped/checkpoints/step-{step}/COMPLETE").exists()


def test_a_users_mistake_is_one_line_whoever_makes_it(root: Path) -> None:
    code, _, error = end(begin(root, "wrong", "--target.path", str(root / "nothing"), *TWO))
    assert code == 2
    assert len(error.splitlines()) == 1, error
    assert error.startswith("slipstream: ")


def test_torchrun_with_another_number_of_processes_is_refused(root: Path) -> None:
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", "1")
    code, _, error = end(begin(root, "number", *TWO, launcher=launcher))
    assert code != 0
    assert "torchrun started 1 processes on this machine and the topology has 2 drafters" in error
