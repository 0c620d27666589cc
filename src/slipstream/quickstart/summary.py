"""What the quickstart says at its end: every source of drafts beside the others, and what that is worth."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from slipstream.records import EvalResult


def print_summary(measured: Mapping[str, EvalResult], console: Console) -> None:
    """Print tau and measured speed of each drafter (by name) beside the free baselines of the same block size."""
    from rich.table import Table

    table = Table(title="drafts from", title_justify="left")
    for column, side in (("", "left"), ("block", "right"), ("tau", "right"), ("tokens/s", "right"), ("x", "right")):
        table.add_column(column, justify=side)  # type: ignore[arg-type]
    told: set[int] = set()
    for name, result in measured.items():
        speedup = result.as_json()["speedup"]
        table.add_row(
            name,
            str(result.block_size),
            f"{result.tau:.3f}",
            f"{result.tokens_per_second:.0f}",
            "" if speedup is None else f"{speedup:.2f}",
            style="bold",
        )
        if result.block_size not in told:
            told.add(result.block_size)
            for baseline, tau in result.baselines.items():
                table.add_row(f"{baseline.replace('_', ' ')} (free)", str(result.block_size), f"{tau:.3f}", "", "")
    plain = next(iter(measured.values()))
    table.add_row("nothing (plain decoding)", "1", "1.000", f"{plain.baseline_tokens_per_second:.0f}", "1.00")
    console.print(table)


def what_this_was(measured: Mapping[str, EvalResult], length: str, device: str) -> str:
    """Return the honest sentence about what a few minutes can and cannot give, with what was measured.

    The first of ``measured`` is this run's drafter, the second, where there is one, the shipped one.
    """
    (_, run), *others = measured.items()
    name, best = max(run.baselines.items(), key=lambda item: item[1])
    beside = (
        f"the best free baseline, {name.replace('_', ' ')}, reaches {best:.3f} without any training"
        if best >= run.tau
        else f"it beats the best free baseline here ({name.replace('_', ' ')}, {best:.3f})"
    )
    more = "".join(f" What more training gives, on a GPU: {other.tau:.3f} ({which})." for which, other in others)
    return (
        f"{length} of training ({device}) show that the line works. Untrained, acceptance is 1.0 tokens a target pass; "
        f"here it is {run.tau:.3f}; {beside}.{more}"
    )
