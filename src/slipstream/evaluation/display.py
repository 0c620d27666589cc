"""What an evaluation shows: progress while it decodes, and the table of what it measured."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from slipstream.decoding.losslessness import faults

if TYPE_CHECKING:
    from rich.console import Console

    from slipstream.decoding.block_trial import BlockComparison
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


class TrialDisplay:
    """Progress while block sizes are tried: a bar on a terminal, a line at the start elsewhere."""

    def __init__(self, console: Console, sizes: Sequence[int], prompts: int) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self.console = console
        self._text = f"trying blocks of {listed(sizes)} on {prompts} prompts"
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._bar = self._bars.add_task(self._text, total=None)

    def __enter__(self) -> TrialDisplay:
        if not self.console.is_terminal:
            self.console.print(self._text, markup=False, soft_wrap=True)
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def update(self, done: int, total: int) -> None:
        """Note that ``done`` of ``total`` runs have ended."""
        self._bars.update(self._bar, completed=done, total=total)


def listed(sizes: Sequence[int]) -> str:
    """Return the sizes as words: "4", "4 and 8", "4, 6 and 8"."""
    *most, last = map(str, sizes)
    return f"{', '.join(most)} and {last}" if most else last


def print_comparison(found: BlockComparison, console: Console) -> None:
    """Print the block sizes that were tried, which one is used, and why."""
    from rich.table import Table

    table = Table(title=f"block sizes, {found.prompts} prompts, batch {found.batch_size}", title_justify="left")
    for column in ("block", "tau", "tokens/s", "x plain"):
        table.add_column(column, justify="right")
    table.add_row("none (plain)", "1.000", f"{found.plain_tokens_per_second:.1f}", "1.00")
    for tried in found.tried:
        style = "bold" if tried.block_size == found.chosen else None
        cells = (f"{tried.tau:.3f}", f"{tried.tokens_per_second:.1f}", f"{tried.ratio:.2f}")
        table.add_row(str(tried.block_size), *cells, style=style)
    console.print(table)
    for line in comparison_lines(found):
        console.print(line, markup=False, soft_wrap=True)


def comparison_lines(found: BlockComparison) -> list[str]:
    """Return what a comparison chose, why, and what it is to be read with."""
    best = next(t for t in found.tried if t.block_size == found.chosen)
    others = [t for t in found.tried if t is not best]
    second = max(others, key=lambda t: t.ratio, default=None)
    why = "the only one tried" if second is None else f"the fastest; block {second.block_size} gives {second.ratio:.2f}"
    lines = [
        f"block {found.chosen} is used: {best.ratio:.2f} x plain decoding, {why} (shortest of {found.repeats} times a "
        f"batch, in turns, at most {found.max_new_tokens} tokens a response)"
    ]
    if best.ratio < 1:
        lines.append("no size is faster than plain decoding here; it loses least")
    spread = max(found.plain_spread, *(t.spread for t in found.tried))
    if second is not None and best.ratio < 1.02 * second.ratio:
        lines.append("the two are too close to tell apart")
    if spread > 0.5:
        lines.append(
            f"times differed by up to {spread:.0%}: the machine does other work, so distrust small differences"
        )
    if not found.separate:
        lines.append(
            "there are too few prompts for a part of its own: the evaluation has the same prompts, which flatters the "
            "choice a little"
        )
    return lines


def print_result(result: EvalResult, console: Console) -> None:
    """Print acceptance beside the free baselines, losslessness and measured speed."""
    from rich.table import Table

    trained = result.details.get("trained_block_size", result.block_size)
    how = "the first of" if result.details.get("drafted_block_size", result.block_size) == trained else "trained with"
    block = f"block {result.block_size}" + ("" if trained == result.block_size else f" ({how} {trained})")
    table = Table(title=f"{block}, {result.prompts} prompts", title_justify="left")
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
    speedup, after = result.as_json()["speedup"], result.details.get("speedup_after_prefill")
    console.print(
        f"speed: {result.tokens_per_second:.1f} tokens/s with the drafter, "
        f"{result.baseline_tokens_per_second:.1f} without"
        + ("" if speedup is None else f": {speedup:.2f} x")
        + ("" if after is None else f" (once the prompts are read: {after:.2f} x)"),
        markup=False,
        soft_wrap=True,
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
