"""Evaluation's progress: each of the two runs over the prompts has its own count, rate and time left."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from slipstream.evaluation import display
from slipstream.evaluation.display import EvaluationDisplay


class Clock:
    """Stands in for ``time``."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(display, "time", clock)
    return clock


def decode(display: EvaluationDisplay, clock: Clock, prompts: int) -> None:
    """Report as ``evaluate`` does: a second a response without the drafter, half a second with it."""
    for done in range(1, 2 * prompts + 1):
        clock.now += 1.0 if done <= prompts else 0.5
        display.update(done, 2 * prompts)


def test_lines_name_the_run_and_count_its_prompts(clock: Clock) -> None:
    stream = io.StringIO()
    with EvaluationDisplay(Console(file=stream, width=200)) as display:
        decode(display, clock, 64)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "plain decoding: 13 of 64 prompts, 1.0 prompts/s, about 51 s left"
    assert lines[4] == "plain decoding: 64 of 64 prompts, 1.0 prompts/s, took 64 s"
    assert lines[5] == "with the drafter: 13 of 64 prompts, 2.0 prompts/s, about 26 s left"
    assert lines[9] == "with the drafter: 64 of 64 prompts, 2.0 prompts/s, took 32 s"
    assert len(lines) == 10


def test_one_prompt_is_enough(clock: Clock) -> None:
    stream = io.StringIO()
    with EvaluationDisplay(Console(file=stream, width=200)) as display:
        decode(display, clock, 1)
    assert [line.split(",")[0] for line in stream.getvalue().splitlines()] == [
        "plain decoding: 1 of 1 prompts", "with the drafter: 1 of 1 prompts",
    ]  # fmt: skip


def test_a_terminal_gets_a_bar_for_each_run(clock: Clock) -> None:
    stream = io.StringIO()
    with EvaluationDisplay(Console(file=stream, width=160, force_terminal=True)) as display:
        decode(display, clock, 4)
    text = stream.getvalue()
    for part in ("plain decoding", "with the drafter", "4/4", "prompts/s"):
        assert part in text
