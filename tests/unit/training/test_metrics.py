"""Pooled figures, lines of metrics.jsonl, and cutting them at a checkpoint."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
import torch

from slipstream.errors import TrainingError
from slipstream.records import StepResult
from slipstream.training.metrics import MetricsLog, MetricWindow, cut_after, last_line


def result(loss: float, weight: float, blocks: int, accepted: int, correct: list[int], valid: list[int]) -> StepResult:
    return StepResult(
        loss_sum=torch.tensor(loss),
        weight_sum=torch.tensor(weight),
        blocks=torch.tensor(blocks),
        accepted=torch.tensor(accepted),
        correct_by_slot=torch.tensor(correct),
        valid_by_slot=torch.tensor(valid),
        hard_sum=torch.tensor(3.0 * loss),
    )


def test_the_loss_of_the_datas_tokens_is_reported_beside_that_of_soft_labels():
    hard, soft = (MetricWindow(3, torch.device("cpu"), soft_labels=labels) for labels in (False, True))
    for window in (hard, soft):
        for number in (1.0, 3.0):
            window.add_micro_batch(result(number, 2.0, 1, 0, [0, 0], [1, 1]))
    again = MetricWindow(3, torch.device("cpu"), soft_labels=True)
    again.restore(soft.tensors())
    assert "window.hard" not in hard.tensors()
    assert "hard_loss" not in hard.report()
    found = again.report()
    assert (found["loss"], found["hard_loss"]) == (1.0, 3.0)
    assert again.report()["hard_loss"] is None  # and the next window starts from nothing


def test_figures_are_pooled_sums_not_means_of_means():
    """Runs 3, 2, 1, 0 have mean 1.5; a product of averaged accuracies would say something else."""
    window = MetricWindow(4, torch.device("cpu"))
    window.add_micro_batch(result(6.0, 2.0, 1, 3, [1, 1, 1], [1, 1, 1]))
    window.add_micro_batch(result(1.0, 2.0, 3, 3, [2, 1, 0], [3, 3, 0]))
    window.add_step(torch.tensor(2.0), torch.tensor(4.0))
    window.add_step(torch.tensor(0.0), torch.tensor(0.0))
    report = window.report()
    assert report["loss"] == pytest.approx(7 / 4)
    assert report["teacher_forced_acceptance_length"] == pytest.approx(1 + 6 / 4)
    assert report["teacher_forced_accuracy_by_slot"] == pytest.approx([0.75, 0.5, 1.0])
    assert report["grad_norm"] == pytest.approx(2.0)
    assert report["anchors_per_step"] == 2
    assert report["empty_steps"] == 1
    assert window.report()["loss"] is None, "the next window starts at zero"


def test_a_window_goes_through_a_checkpoint():
    one, two = (MetricWindow(3, torch.device("cpu")) for _ in range(2))
    one.add_micro_batch(result(0.1, 0.7, 5, 2, [1, 0], [3, 1]))
    one.add_step(torch.tensor(0.3), torch.tensor(0.7))
    two.restore({k: v.clone() for k, v in one.tensors().items()})
    for window in (one, two):
        window.add_micro_batch(result(0.2, 0.1, 1, 1, [1, 0], [1, 1]))
        window.add_step(torch.tensor(0.1), torch.tensor(0.1))
    assert one.report() == two.report()


def test_every_line_names_run_kind_and_step_and_is_strict_json(tmp_path: Path):
    log = MetricsLog(tmp_path, "run-1")
    log.write("train", 1, {"loss": 2.0, "bad": float("nan")})
    log.write("evaluation", 1, {"decoded_acceptance_length": 1.5})
    log.sync()
    log.close()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows[0] == {"run": "run-1", "kind": "train", "step": 1, "loss": 2.0, "bad": None}
    assert rows[1]["kind"] == "evaluation"
    assert last_line(tmp_path / "metrics.jsonl", "train") == rows[0]
    assert last_line(tmp_path / "metrics.jsonl", "other") is None
    assert last_line(tmp_path / "absent", "train") is None
    assert any("tfevents" in name for name in os.listdir(tmp_path / "tensorboard"))


def write(path: Path, steps: list[int], tail: str = "\n") -> None:
    path.write_text("\n".join(json.dumps({"kind": "train", "step": s}) for s in steps) + tail)


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_later_lines_are_moved_aside_not_lost(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    write(path, [1, 2, 3, 4])
    assert cut_after(path, 2) == 2
    assert steps(path) == [1, 2]
    assert steps(tmp_path / "metrics.discarded.jsonl") == [3, 4]
    write(path, [1, 2, 3])
    assert cut_after(path, 2) == 1
    assert steps(tmp_path / "metrics.discarded.jsonl") == [3, 4, 3]
    assert cut_after(path, 2) == 0
    assert cut_after(tmp_path / "absent", 0) == 0


def test_a_torn_last_line_goes_too_and_a_missing_newline_is_mended(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    write(path, [1, 2], tail='\n{"kind": "train", "st')
    assert cut_after(path, 5) == 1
    assert steps(path) == [1, 2]
    write(path, [1, 2], tail="")
    assert cut_after(path, 5) == 0
    assert path.read_text().endswith("}\n")


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    log = MetricsLog(tmp_path, "r")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(TrainingError, match=r"metrics\.jsonl cannot be written: No space left on device"):
        log.sync()
    log.close()


def test_a_directory_that_is_not_there_is_one_line(tmp_path: Path):
    with pytest.raises(TrainingError, match="cannot be opened: No such file"):
        MetricsLog(tmp_path / "absent", "r")
