"""What an evaluation shows: progress while it decodes, and the table of what it measured."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from slipstream.decoding.losslessness import faults

if TYPE_CHECKING:
    from rich.console import Console

    from slipstream.records import EvalResult


class EvaluationDisplay:
    """Progress over plain and then block decoding of the same prompts: a bar each on a terminal, lines elsewhere."""

    def __init__(self, console: Console) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self.console = console
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._start("plain decoding")

    def _start(self, stage: str) -> None:
        self._stage = stage
        self._bar = self._bars.add_task(stage, total=None, figures="")
        self._began = time.monotonic()
        self._told = 0

    def __enter__(self) -> EvaluationDisplay:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def update(self, done: int, total: int) -> None:
        """Note that ``done`` of ``total`` responses have ended, the first half of them without the drafter."""
        prompts = total // 2
        ended = done if done <= prompts else done - prompts
        spent = max(time.monotonic() - self._began, 1e-9)
        left = f"took {spent:.0f} s" if ended == prompts else f"about {spent * (prompts - ended) / ended:.0f} s left"
        figures = f"{ended / spent:.1f} prompts/s, {left}"
        self._bars.update(self._bar, completed=ended, total=prompts, figures=figures)
        if not self.console.is_terminal and (fifth := 5 * ended // prompts) > self._told:
            self._told = fifth
            text = f"{self._stage}: {ended} of {prompts} prompts, {figures}"
            self.console.print(text, markup=False, soft_wrap=True)
        if done == prompts:
            self._start("with the drafter")


def print_result(result: EvalResult, console: Console) -> None:
    """Print acceptance beside the free baselines, losslessness and measured speed."""
    from rich.table import Table

    table = Table(title=f"block {result.block_size}, {result.prompts} prompts", title_justify="left")
    table.add_column("drafts from")
    table.add_column("tau", justify="right")
    table.add_row("nothing (plain decoding)", "1.000")
    table.add_row("this drafter", f"{result.tau:.3f}", style="bold")
    for name, tau in result.baselines.items():
        table.add_row(name.replace("_", " "), f"{tau:.3f}")
    console.print(table)
    by_position = "  ".join(f"{share:.3f}" for share in result.acceptance_by_position)
    console.print(f"acceptance by position (cumulative): {by_position}", markup=False)
    console.print(f"mean over responses: tau {result.tau_per_response:.3f}", markup=False)
    if result.details.get("cut_passes_counted"):
        console.print(
            "every pass was cut by eos or the token limit, so tau counts cut passes and is too low: use other prompts "
            "or raise evaluation.max_new_tokens",
            style="yellow",
            soft_wrap=True,
        )
    elif (every := result.details.get("tau_all_passes")) is not None and result.details.get("cut_passes"):
        console.print(
            f"with the {result.details['cut_passes']} last passes that eos or the token limit cut: tau {every:.3f}",
            markup=False,
        )
    for line in losslessness(result):
        console.print(line, markup=False, soft_wrap=True)
    speedup = result.as_json()["speedup"]
    console.print(
        f"speed: {result.tokens_per_second:.1f} tokens/s with the drafter, "
        f"{result.baseline_tokens_per_second:.1f} without" + ("" if speedup is None else f": {speedup:.2f} x"),
        markup=False,
    )
    if (even := result.details.get("break_even_tau")) is not None:
        console.print(
            f"a round of drafting and verifying cost {even:.2f} plain steps: speed-up begins at tau {even:.2f}",
            markup=False,
            soft_wrap=True,
        )
        if even < 1:
            console.print(
                "a round cannot cost less than a plain step: other work slowed plain decoding; distrust the speed-up",
                style="yellow",
                soft_wrap=True,
            )


def losslessness(result: EvalResult) -> list[str]:
    """Return the lines that say how block decoding's output compares with plain decoding's."""
    equal, responses, differences = result.lossless_equal, result.lossless_responses, result.first_differences
    if result.temperature > 0:
        return [
            f"{equal} of {responses} responses sampled at temperature {result.temperature:g} equal plain decoding "
            "with the same noise"
        ]
    dtype = result.details.get("target_dtype", "its dtype")
    if equal == responses:
        return [f"lossless: {equal} of {responses} greedy responses equal plain decoding in {dtype}"]
    lossy = faults(differences)
    if not lossy:
        return [
            f"lossless up to rounding: {equal} of {responses} greedy responses equal plain decoding; the other "
            f"{responses - equal} part where the target's best tokens nearly tie in {dtype} "
            "(--evaluation.dtype float32 decides those exactly)"
        ]
    lines = [f"NOT lossless: {len(lossy)} of {responses} greedy responses part from plain decoding at no near tie"]
    return lines + [f"  {difference}" for difference in lossy[:5]]
