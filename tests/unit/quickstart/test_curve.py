"""Learning curves are read off the metrics and shown side by side."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from slipstream.errors import TrainingError
from slipstream.quickstart.curve import CurvePoint, learning_curve, print_curves, thinned


def write(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_an_evaluation_has_the_tokens_and_the_time_of_the_training_before_it(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"kind": "train", "step": 10, "tokens": 5000, "elapsed": 30.0},
        {"kind": "evaluation", "step": 10, "decoded_acceptance_length": 1.25, "elapsed": 55.0},
        {"kind": "train", "step": 20, "tokens": 10000, "elapsed": 60.0},
        {"kind": "evaluation", "step": 20, "decoded_acceptance_length": 1.5, "elapsed": 85.0},
    ]
    found = learning_curve(write(tmp_path / "metrics.jsonl", rows))
    assert found == [CurvePoint(10, 0.5, 5000, 1.25), CurvePoint(20, 1.0, 10000, 1.5)]


@pytest.mark.parametrize("text", ["{", '{"kind": "train", "step": 1}\n', '{"step": 1}\n'])
def test_a_file_that_no_run_writes_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(TrainingError, match=r"metrics\.jsonl is not what a run writes"):
        learning_curve(path)
    with pytest.raises(TrainingError, match="FileNotFoundError"):
        learning_curve(tmp_path / "gone")


def test_thinning_keeps_both_ends() -> None:
    points = [CurvePoint(i, float(i), i, 1.0) for i in range(50)]
    assert [p.step for p in thinned(points, 5)] == [0, 12, 24, 37, 49]
    assert thinned(points[:3], 5) == points[:3]


def test_curves_of_other_lengths_stand_side_by_side() -> None:
    console = Console(file=io.StringIO(), width=120)
    curves = {
        "this run": [CurvePoint(1, 0.5, 900, 1.1)],
        "other": [CurvePoint(i, i, i * 10**6, 1.0 + i) for i in (1, 2)],
    }
    print_curves(curves, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "900" in text
    assert "2.0M" in text
    assert text.count("█" * 12) == 1  # only the highest is a whole bar
    print_curves(
        {"this run": [], "flat": [CurvePoint(1, 1.0, 1, 1.0)]}, console
    )  # no acceptance at all divides nothing
