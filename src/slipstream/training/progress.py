"""The display of a training run: a live bar on a terminal, plain lines with a rate and an estimate elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn


def duration(seconds: float | None) -> str:
    """Return ``1:02:03`` or ``2:03``; ``-:--`` where unknown."""
    if seconds is None:
        return "-:--"
    minutes, rest = divmod(round(max(seconds, 0.0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def describe(values: dict[str, Any]) -> str:
    """Return loss, teacher-forced acceptance and tokens/s of a metrics line, short."""
    loss, acceptance = values.get("loss"), values.get("teacher_forced_acceptance_length")
    parts = [
        "loss -" if loss is None else f"loss {loss:.3f}",
        "tf-acceptance -" if acceptance is None else f"tf-acceptance {acceptance:.2f}",
    ]
    rate = values.get("tokens_per_second")
    if rate is not None:
        parts.append(f"{rate:,.0f} tok/s")
    return "  ".join(parts)


class TrainingDisplay:
    """Shows where a run is. ``progress`` is 0..1 of steps or of time, whichever leads. Use as a context manager.

    ``tf-acceptance`` is the teacher-forced acceptance length (bonus token included), not the decoded one.
    """

    def __init__(self, console: Console, *, steps: int | None, start: float) -> None:
        self.console = console
        self.steps = steps
        self._first = start
        self._progress = start
        self._began = time.monotonic()
        self._live: Progress | None = None
        self._task: TaskID | None = None
        if console.is_terminal:
            self._live = Progress(
                TextColumn("training"),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[where]}  {task.fields[figures]}  left {task.fields[left]}"),
                console=console,
                transient=False,
            )

    def __enter__(self) -> TrainingDisplay:
        if self._live is not None:
            self._live.start()
            self._task = self._live.add_task("", total=1.0, where="step 0", figures="", left="-:--")
            self._live.update(self._task, completed=self._first)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def time_left(self) -> float | None:
        """Return the seconds left at this session's rate; None before there is one."""
        moved = self._progress - self._first
        return (time.monotonic() - self._began) / moved * (1.0 - self._progress) if moved > 0 else None

    def _where(self, step: int) -> str:
        """Return the step beside the limit that will bind at this pace: ``progress`` is ahead of the steps by time."""
        if self.steps is None or self._progress > step / self.steps + 1e-9:
            return f"step {step} ({self._progress:.0%} of the time limit)"
        return f"step {step}/{self.steps}"

    def advance(self, step: int, progress: float) -> None:
        """Note a finished step. Host values only: nothing waits for the GPU."""
        self._progress = min(max(progress, self._progress), 1.0)
        if self._live is not None and self._task is not None:
            left = duration(self.time_left())
            self._live.update(self._task, completed=self._progress, where=self._where(step), left=left)

    def report(self, step: int, values: dict[str, Any]) -> None:
        """Show a metrics line."""
        if self._live is not None and self._task is not None:
            self._live.update(self._task, figures=describe(values))
        else:
            self.say(f"{self._where(step)}  {describe(values)}  left {duration(self.time_left())}")

    def say(self, text: str) -> None:
        """Print a line; on a terminal it stays above the bar."""
        self.console.print(text, markup=False, soft_wrap=True)
