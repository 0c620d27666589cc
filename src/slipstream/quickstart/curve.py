"""The learning curve: acceptance as it was decoded while a drafter trained, beside that of another run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.errors import TrainingError

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One decoded acceptance. ``tokens``: target tokens read until then; ``minutes``: of training, evaluations not."""

    step: int
    minutes: float
    tokens: int
    tau: float


def learning_curve(metrics: Path) -> list[CurvePoint]:
    """Return the decoded acceptances of a run's ``metrics.jsonl``, in order. Raises TrainingError for an unusable file.

    Tokens and time of training are those of the newest training line at or before the step.
    """
    points: list[CurvePoint] = []
    tokens, minutes = 0, 0.0
    try:
        for line in metrics.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if row["kind"] == "train":
                tokens, minutes = int(row["tokens"]), float(row["elapsed"]) / 60
            elif row["kind"] == "evaluation":
                tau = float(row["decoded_acceptance_length"])
                points.append(CurvePoint(int(row["step"]), minutes, tokens, tau))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TrainingError(
            f"{metrics} is not what a run writes ({type(error).__name__}: {error}); put back the run's own"
        ) from error
    return points


def thinned(points: Sequence[CurvePoint], most: int) -> list[CurvePoint]:
    """Return at most ``most`` (two or more) of the points, evenly spread, the first and the last among them."""
    if len(points) <= most:
        return list(points)
    return [points[round(i * (len(points) - 1) / (most - 1))] for i in range(most)]


def print_curves(curves: Mapping[str, Sequence[CurvePoint]], console: Console, *, most: int = 8) -> None:
    """Print the curves side by side as one table: minutes, tokens read, acceptance with a bar to see it by."""
    from rich.table import Table

    shown = {name: thinned(points, most) for name, points in curves.items() if points}
    if not shown:
        return
    top = max(p.tau for points in shown.values() for p in points)
    console.print("learning curve: decoded tau on held-out prompts while training")
    table = Table()
    for name in shown:
        table.add_column(f"{name}\nminutes", justify="right")
        table.add_column("\ntokens", justify="right")
        table.add_column("\ntau", justify="right")
        table.add_column("", justify="left")
    for number in range(max(len(points) for points in shown.values())):
        cells: list[str] = []
        for points in shown.values():
            if number < len(points):
                p = points[number]
                cells += [f"{p.minutes:.1f}", _count(p.tokens), f"{p.tau:.2f}", _bar(p.tau, top)]
            else:
                cells += [""] * 4
        table.add_row(*cells)
    console.print(table)


def _count(tokens: int) -> str:
    """Return a token count in at most five characters."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if tokens >= limit:
            value = tokens / limit
            return f"{value:.1f}{unit}" if value < 100 else f"{value:.0f}{unit}"
    return str(tokens)


def _bar(tau: float, top: float, width: int = 12) -> str:
    """Return a bar from tau 1, which is no drafter at all, to ``top``."""
    return "█" * round(width * (tau - 1) / (top - 1)) if top > 1 and tau > 1 else ""
