"""What a stress run shows: progress with a rate and an estimate, one table, and a line for what went wrong."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from slipstream.compilation.stress_plan import Round, Row

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

# Without a terminal, a line so often.
SECONDS_BETWEEN_LINES = 15.0


class Display:
    """Progress over the rounds of all workloads: a bar on a terminal, lines elsewhere. For one thread."""

    def __init__(self, console: Console, total: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self.console, self.total, self.done, self.played, self.bad = console, total, 0, 0, 0
        self.what = ""
        self.began = self.told = time.monotonic()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=total, figures="")

    def __enter__(self) -> Display:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def begin(self, workload: str, guard: bool) -> None:
        """Say which workload is played from now on."""
        self.what, self.bad = f"{workload}, guard {'on' if guard else 'off'}", 0
        self._show()

    def seen(self, found: Round) -> None:
        """Show a round."""
        self.done, self.played, self.bad = self.done + 1, self.played + 1, self.bad + found.bad
        self._show()

    def end(self, asked: int, played: int) -> None:
        """Say that a workload is over; rounds that were not played count as done."""
        self.done += asked - played
        self._show(last=True)

    def figures(self) -> str:
        """Return rate and estimate."""
        seconds = time.monotonic() - self.began
        if not self.played or not seconds:
            return ""
        rate = self.played / seconds
        left = (self.total - self.done) / rate
        return f"{rate:.2f} rounds/s, about {left:,.0f} s left"

    def _show(self, last: bool = False) -> None:
        figures = f"{self.bad} bad, {self.figures()}" if self.played else ""
        self._bar.update(self._task, completed=self.done, description=self.what, figures=figures)
        now = time.monotonic()
        if not self.console.is_terminal and self.played and (last or now - self.told > SECONDS_BETWEEN_LINES):
            self.told = now
            line = f"{self.what}: {self.done:,} of {self.total:,} rounds, {figures}"
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)


def table(rows: list[Row], *, device: str, threads: int, seed: int) -> Table:
    """Return the table of all rows."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    versions = next((row.versions for row in rows if row.versions), {})
    told = ", ".join(f"{name} {version}" for name, version in versions.items())
    title = f"{threads} threads on {device}, seed {seed}; {told}"
    # Fits 80 columns.
    made = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=0)
    made.add_column("workload", no_wrap=True)
    made.add_column("guard")
    for heading in (
        *("rounds", "fresh starts", "failures", "dense calls", "hangs", "wrong values", "tunings per key"),
    ):
        made.add_column(heading, justify="right")
    for row in rows:
        made.add_row(
            row.workload,
            "on" if row.guard else "off",
            *map(str, (len(row.rounds), row.processes, row.failures, row.dense, row.hangs, row.wrong)),
            "-" if row.tunings is None else f"{row.tunings:.2f}",
            style="bold red" if row.guard and not row.clean else None,
        )
    return made


def explain(rows: list[Row]) -> list[str]:
    """Return the lines under the table: each row's commonest message, wrong values, stacks, and what is missing."""
    lines = []
    for row in rows:
        where = f"{row.workload}, guard {'on' if row.guard else 'off'}"
        if messages := row.messages():
            (message, times), others = messages[0], len(messages) - 1
            more = f"; {others} other message{'s' if others > 1 else ''}" if others else ""
            lines.append(f"{where}: {message} ({times} thread{'s' if times > 1 else ''}{more})")
        wrong = next((f"round {r.number}, {r.wrong[0]}" for r in row.rounds if r.wrong), "")
        if wrong:
            lines.append(f"{where}: wrong values, first in {wrong}")
        lines += [f"{where}: every thread's stack is in {path}" for path in row.stacks]
        lines += [f"{where}: left out: {what}" for what in row.left_out()]
        if row.note:
            lines.append(f"{where}: {row.note}")
        if not row.guard and row.clean:
            lines.append(
                f"{row.workload}: nothing went wrong without the guard either; clean rounds with it prove little here"
            )
    return lines
