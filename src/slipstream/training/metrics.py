"""What a run reports: pooled sums on the device, ``metrics.jsonl``, and TensorBoard.

Acceptance here is *teacher-forced*: the drafter's argmax against the training text, leading slots that agree, plus the
bonus token. It is an upper guess, never the headline; decoded acceptance is measured by ``decoding.acceptance``.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import TrainingError
from slipstream.provenance import write_atomically
from slipstream.records import StepResult
from slipstream.training.ranks import Ranks

WINDOW_COUNTS = ("loss_sum", "weight_sum", "blocks", "accepted", "grad_norm", "steps", "empty_steps")


class MetricWindow:
    """Sums since the last report, float64, on the drafter's device; no host sync until ``report``.

    Saved with a checkpoint, so that a resumed run reports what an uninterrupted one does. Not thread-safe.
    """

    def __init__(self, block_size: int, device: torch.device, *, soft_labels: bool = False) -> None:
        self.counts = torch.zeros(len(WINDOW_COUNTS), dtype=torch.float64, device=device)
        self.correct = torch.zeros(block_size - 1, dtype=torch.float64, device=device)
        self.valid = torch.zeros(block_size - 1, dtype=torch.float64, device=device)
        # Kept apart, so that a window of hard labels, where it would be the loss again, stays as it has been saved.
        self.hard = torch.zeros((), dtype=torch.float64, device=device) if soft_labels else None

    def add_micro_batch(self, result: StepResult) -> None:
        """Add what one micro-batch and draw gave."""
        parts = (result.loss_sum, result.weight_sum, result.blocks, result.accepted)
        self.counts[: len(parts)] += torch.stack([p.detach().double() for p in parts])
        self.correct += result.correct_by_slot.double()
        self.valid += result.valid_by_slot.double()
        if self.hard is not None:
            self.hard += result.hard_sum.double()

    def add_step(self, grad_norm: Tensor, weight_sum: Tensor) -> None:
        """Add an optimizer step: its gradient norm before clipping, and whether it held any supervised anchor."""
        one = torch.ones_like(self.counts[0])
        self.counts[4:] += torch.stack([grad_norm.double(), one, (weight_sum <= 0).double()])

    def gather(self, ranks: Ranks) -> None:
        """Bring the sums of all ranks' micro-batches to the first one; called by all. Steps are every rank's own."""
        if ranks.size == 1:
            return
        local = self.counts[:4]
        for sums in (local, self.correct, self.valid, *(() if self.hard is None else (self.hard,))):
            ranks.sum(sums)
            if not ranks.first:
                sums.zero_()

    def tensors(self) -> dict[str, Tensor]:
        """Return the sums, for a checkpoint."""
        found = {"window.counts": self.counts, "window.correct": self.correct, "window.valid": self.valid}
        return found if self.hard is None else {**found, "window.hard": self.hard}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Take back what ``tensors`` returned."""
        self.counts.copy_(tensors["window.counts"])
        self.correct.copy_(tensors["window.correct"])
        self.valid.copy_(tensors["window.valid"])
        if self.hard is not None:
            self.hard.copy_(tensors["window.hard"])

    def report(self) -> dict[str, Any]:
        """Return the window's figures and start the next one. Waits for the device.

        ``loss`` is the weighted mean; ``hard_loss``, with soft labels only, is what hard labels would have given;
        ``teacher_forced_acceptance_length`` counts the bonus token (>= 1); all None
        where the window held no supervised anchor. ``teacher_forced_accuracy_by_slot`` has B-1 entries.
        """
        total = dict(zip(WINDOW_COUNTS, self.counts.tolist(), strict=True))
        correct, valid = self.correct.tolist(), self.valid.tolist()
        hard = None if self.hard is None else self.hard.item()
        if self.hard is not None:
            self.hard.zero_()
        self.counts.zero_()
        self.correct.zero_()
        self.valid.zero_()
        steps = max(total["steps"], 1.0)
        filled = total["steps"] - total["empty_steps"]
        weight = total["weight_sum"]
        return {
            "loss": total["loss_sum"] / weight if weight > 0 else None,
            **({} if hard is None else {"hard_loss": hard / weight if weight > 0 else None}),
            "teacher_forced_acceptance_length": 1 + total["accepted"] / total["blocks"]
            if total["blocks"] > 0
            else None,
            "teacher_forced_accuracy_by_slot": [c / v if v > 0 else None for c, v in zip(correct, valid, strict=True)],
            "grad_norm": total["grad_norm"] / filled if filled > 0 else None,
            "anchors_per_step": total["blocks"] / steps,
            "empty_steps": int(total["empty_steps"]),
        }


class MetricsLog:
    """Appends lines to ``metrics.jsonl`` (``run`` and ``step`` on each) and scalars to TensorBoard. Not thread-safe."""

    def __init__(self, directory: Path, run_id: str, *, resumed_from: int | None = None) -> None:
        """Open the log. ``resumed_from``: a checkpoint's step; ``cut_after`` goes first. Raises TrainingError."""
        self.run_id = run_id
        self.path = directory / "metrics.jsonl"
        try:
            self._stream = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 - open for the life of the run
        except OSError as error:
            raise TrainingError(f"{self.path} cannot be opened: {error.strerror}") from error
        from torch.utils.tensorboard import SummaryWriter

        purge = None if resumed_from is None else resumed_from + 1
        self._board = SummaryWriter(str(directory / "tensorboard"), purge_step=purge)

    def write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Append one line: ``kind``: train or evaluation; ``step``: finished optimizer steps. Raises TrainingError."""
        line = {"run": self.run_id, "kind": kind, "step": step, **{k: _finite(v) for k, v in values.items()}}
        try:
            self._stream.write(json.dumps(line, allow_nan=False) + "\n")
            self._stream.flush()
            for name, value in values.items():
                if isinstance(value, (int, float)) and not isinstance(value, bool):
                    self._board.add_scalar(f"{kind}/{name}", value, step)
        except OSError as error:
            raise TrainingError(
                f"{self.path} cannot be written: {error.strerror}; make room and use --resume"
            ) from error

    def sync(self) -> None:
        """Bring every line to the disk: no checkpoint may be newer than its lines. Raises TrainingError."""
        try:
            self._stream.flush()
            os.fsync(self._stream.fileno())
            self._board.flush()
        except OSError as error:
            raise TrainingError(
                f"{self.path} cannot be written: {error.strerror}; make room and use --resume"
            ) from error

    def close(self) -> None:
        """Close both logs."""
        for stream in (self._stream, self._board):
            with contextlib.suppress(OSError):  # a failed write has been raised where it happened
                stream.close()


def _finite(value: Any) -> Any:
    """JSON has no nan; write null for it rather than a line that strict readers refuse."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def cut_after(path: Path, step: int) -> int:
    """Move the lines of ``metrics.jsonl`` after ``step`` to ``metrics.discarded.jsonl``; return how many.

    They were written after the checkpoint that a resume starts from, and will be written again. A torn last line,
    left by a kill, goes with them, as does a line that no run writes. The file is replaced as a whole, after the moved
    lines are on the disk. Raises TrainingError.
    """
    text = _read_text(path)
    if not text:
        return 0
    kept: list[str] = []
    moved: list[str] = []
    for line in text.splitlines():
        try:
            row = json.loads(line)
            early = row["step"] <= step and isinstance(row["kind"], str)
        except (ValueError, KeyError, TypeError):
            early = False
        (kept if early else moved).append(line)
    try:
        if moved:
            with open(path.with_name("metrics.discarded.jsonl"), "a", encoding="utf-8") as stream:
                stream.write("".join(line + "\n" for line in moved))
                stream.flush()
                os.fsync(stream.fileno())
        if moved or not text.endswith("\n"):
            write_atomically(path, "".join(line + "\n" for line in kept))
    except OSError as error:
        raise TrainingError(
            f"{error.filename or path} cannot be written: {error.strerror}; make room or rights and use --resume"
        ) from error
    return len(moved)


def _read_text(path: Path) -> str:
    """Return the text of ``metrics.jsonl``, empty where there is none. Raises TrainingError."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise TrainingError(
            f"{path} cannot be read: {error.strerror}; put back the file that the run wrote, or remove it"
        ) from error


def last_line(path: Path, kind: str) -> dict[str, Any] | None:
    """Return the newest line of a kind in a whole ``metrics.jsonl``, or None. Raises TrainingError."""
    rows = [json.loads(line) for line in _read_text(path).splitlines()]
    return next((row for row in reversed(rows) if row["kind"] == kind), None)
