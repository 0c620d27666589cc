"""10 steps are 5, a kill -9, a resume and 5 more, to the bit; and what a resume refuses."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slipstream.errors import CheckpointError, TrainingError
from support.tiny import save_tiny_target, tiny_tokenizer, write_conversations
from support.tiny_run import command, lines, make_inputs, overrides, quiet_train, tiny_recipe

# Two micro-batches and two draws a step, and a metric window that the kill cuts in half.
EXACT: dict[str, Any] = {
    "training__steps": 10,
    "training__accumulation": 2,
    "training__draws_per_prefill": 2,
    "training__log_every": 2,
    "training__checkpoint_every": 5,
    "training__loss": "dpace",
}
MEASURED = (
    "step",
    "loss",
    "teacher_forced_acceptance_length",
    "teacher_forced_accuracy_by_slot",
    "grad_norm",
    "learning_rate",
    "anchors_per_step",
    "tokens",
    "epoch",
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("resume"))


def kill_when(arguments: list[str], ready: Any, number: int) -> subprocess.Popen[str]:
    """Start a real training process and send it a signal as soon as ``ready()``."""
    argv, environment = command(arguments)
    process = subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not ready():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(number)
    return process


def written_steps(run: Path) -> list[int]:
    try:
        text = (run / "metrics.jsonl").read_text()
    except FileNotFoundError:
        return []
    return [json.loads(line)["step"] for line in text.splitlines() if line.endswith("}")]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_ten_steps_equal_five_a_kill_and_five_more(root: Path, tmp_path: Path, precision: str):
    settings = {**EXACT, "training__precision": precision, "target__dtype": precision}
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    quiet_train(tiny_recipe(root, straight, **settings))
    victim = kill_when(
        overrides(root, killed, **settings), lambda: max(written_steps(killed), default=0) >= 6, signal.SIGKILL
    )
    victim.communicate()
    assert victim.returncode == -signal.SIGKILL
    last = max(int(p.name.removeprefix("step-")) for p in (killed / "checkpoints").glob("step-*"))
    assert last in (5, 10)
    _, output = quiet_train(tiny_recipe(root, killed, **settings), resume=True)
    assert "resumed from" in output

    one, two = straight / "checkpoints/step-10", killed / "checkpoints/step-10"
    for file in ("drafter/model.safetensors", "optimizer.safetensors", "state.safetensors"):
        a, b = load_file(one / file), load_file(two / file)
        assert a.keys() == b.keys()
        for name, value in a.items():
            assert torch.equal(value, b[name]), f"{file}: {name}"
        assert all(v.dtype in (torch.float32, torch.float64, torch.uint8) for v in b.values())
    assert [row["step"] for row in lines(killed)] == [2, 4, 6, 8, 10]
    for a, b in zip(lines(straight), lines(killed), strict=True):
        assert {k: a[k] for k in MEASURED} == {k: b[k] for k in MEASURED}
    assert len({row["run"] for row in lines(killed)}) == 1
    if last == 5:
        assert "moved to metrics.discarded.jsonl" in output
        assert json.loads((killed / "metrics.discarded.jsonl").read_text().splitlines()[0])["step"] == 6
    record = json.loads((killed / "run.json").read_text())
    assert [r["from_step"] for r in record["resumed"]] == [last]
    a, b = (load_file(run / "drafter/model.safetensors") for run in (straight, killed))
    assert all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_saves_and_the_run_goes_on(root: Path, tmp_path: Path, number: signal.Signals):
    run = tmp_path / "run"
    settings = {"training__steps": 100000}
    process = kill_when(overrides(root, run, **settings), lambda: max(written_steps(run), default=0) >= 2, number)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert f"stopped by {number.name} after step" in output
    assert "continue with --resume" in output
    assert "Traceback" not in errors
    checkpoint = max((run / "checkpoints").iterdir(), key=lambda p: int(p.name.removeprefix("step-")))
    step = int(checkpoint.name.removeprefix("step-"))
    assert written_steps(run) == list(range(1, step + 1))
    state = json.loads((checkpoint / "state.json").read_text())
    assert state["step"] == step
    assert not (run / "drafter").exists()


@pytest.fixture(scope="module")
def finished(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("finished") / "run"
    quiet_train(tiny_recipe(root, run, training__steps=2))
    return run


def test_resuming_a_finished_run_changes_nothing(root: Path, finished: Path):
    before = (finished / "metrics.jsonl").read_text()
    summary, output = quiet_train(tiny_recipe(root, finished, training__steps=2), resume=True)
    assert summary.steps == 2
    assert "resumed from" in output
    assert (finished / "metrics.jsonl").read_text() == before


@pytest.mark.parametrize(
    ("change", "name", "before", "now"),
    [
        ({"drafter__block_size": 6}, "drafter.block_size", "8", "6"),
        ({"training__learning_rate": 0.5}, "training.learning_rate", "0.0006", "0.5"),
        ({"training__steps": 9}, "training.steps", "2", "9"),
        ({"training__precision": "bfloat16"}, "training.precision", "float32", "bfloat16"),
        ({"run__seed": 5}, "run.seed", "0", "5"),
        ({"data__row_length": 200}, "data.key", "", ""),
        ({"target__packing": "unpacked"}, "target.packing", "packed", "unpacked"),
    ],
)
def test_resume_refuses_changed_settings(root: Path, finished: Path, change: dict, name: str, before: str, now: str):
    files = sorted(p for p in finished.rglob("*") if p.is_file())
    with pytest.raises(CheckpointError) as caught:
        quiet_train(tiny_recipe(root, finished, **{"training__steps": 2, **change}), resume=True)
    message = str(caught.value)
    assert f"made with {name} = " in message
    assert before in message
    assert now in message
    assert "\n" not in message
    assert sorted(p for p in finished.rglob("*") if p.is_file()) == files


def test_resume_refuses_another_target(root: Path, finished: Path, tmp_path: Path):
    other = save_tiny_target(tmp_path / "other", seed=1)
    with pytest.raises(CheckpointError, match=r"target\.digest = '[0-9a-f]+', this run has '[0-9a-f]+'"):
        quiet_train(tiny_recipe(root, finished, training__steps=2, target__path=other), resume=True)


def test_resume_refuses_another_tokenizer(root: Path, finished: Path, tmp_path: Path):
    import shutil

    other = shutil.copytree(root / "target", tmp_path / "other")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("assistant", "helper")
    tokenizer.save_pretrained(other)
    with pytest.raises(CheckpointError, match=r"tokenizer\.digest = '[0-9a-f]+', this run has '[0-9a-f]+'"):
        quiet_train(tiny_recipe(root, finished, training__steps=2, target__path=other), resume=True)


def test_resume_refuses_other_data(root: Path, finished: Path, tmp_path: Path):
    other = write_conversations(tmp_path / "other.jsonl", 12)
    with pytest.raises(CheckpointError, match=r"data\.key = "):
        quiet_train(tiny_recipe(root, finished, training__steps=2, data__train=other), resume=True)


def test_settings_that_do_not_move_weights_may_change(root: Path, tmp_path: Path):
    run = tmp_path / "run"
    quiet_train(tiny_recipe(root, run, training__steps=2))
    recipe = tiny_recipe(root, run, training__steps=2, training__log_every=7, training__keep_checkpoints=5)
    quiet_train(recipe, resume=True)
    changed = json.loads((run / "run.json").read_text())["resumed"][0]["changed_settings"]
    assert changed == {"training.log_every": [1, 7], "training.keep_checkpoints": [2, 5]}


def test_nothing_to_resume(root: Path, tmp_path: Path):
    with pytest.raises(CheckpointError, match="there is no run in"):
        quiet_train(tiny_recipe(root, tmp_path / "absent"), resume=True)
    run = tmp_path / "empty"
    run.mkdir()
    (run / "run.json").write_text("{}")
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        quiet_train(tiny_recipe(root, run), resume=True)


def test_a_run_in_use_is_not_resumed_by_another_process(root: Path, tmp_path: Path):
    run = tmp_path / "run"
    settings = {"training__steps": 100000, "training__checkpoint_every": 1}
    process = kill_when(
        overrides(root, run, **settings), lambda: len(written_steps(run)) >= 2, signal.SIGCONT
    )  # a signal that does nothing: the process goes on
    try:
        with pytest.raises(TrainingError, match="in use by another process"):
            quiet_train(tiny_recipe(root, run, **settings), resume=True)
    finally:
        process.kill()
        process.communicate()
