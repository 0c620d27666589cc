"""The display: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import io

from rich.console import Console

from slipstream.training.progress import TrainingDisplay, describe, duration

VALUES = {"loss": 2.3456, "teacher_forced_acceptance_length": 1.8, "tokens_per_second": 12345.6}


def test_durations():
    assert [duration(s) for s in (None, 0, 59.6, 61, 3723, -1)] == ["-:--", "0:00", "1:00", "1:01", "1:02:03", "0:00"]


def test_figures_with_and_without_values():
    assert describe(VALUES) == "loss 2.346  tf-acceptance 1.80  12,346 tok/s"
    assert describe({"loss": None, "teacher_forced_acceptance_length": None}) == "loss -  tf-acceptance -"


def test_plain_lines_without_a_terminal():
    stream = io.StringIO()
    with TrainingDisplay(Console(file=stream, width=40), steps=10, start=0.0) as display:
        display.advance(3, 0.3)
        display.report(3, VALUES)
        display.say("a [bracketed] line that is longer than the console is wide")
    text = stream.getvalue()
    assert text.splitlines()[0].startswith("step 3/10  loss 2.346  tf-acceptance 1.80  12,346 tok/s  left 0:")
    assert "a [bracketed] line that is longer than the console is wide\n" in text
    assert "\x1b" not in text


def test_time_based_runs_say_so_and_the_estimate_is_by_progress():
    stream = io.StringIO()
    with TrainingDisplay(Console(file=stream, width=200), steps=None, start=0.5) as display:
        assert display.time_left() is None
        display.advance(7, 0.75)
        left = display.time_left()
        assert left is not None
        assert left >= 0
        display.advance(8, 0.7)  # never backwards
        display.report(8, VALUES)
    assert "step 8 (75% of the time limit)" in stream.getvalue()


def test_with_steps_and_minutes_the_limit_that_will_bind_is_shown():
    stream = io.StringIO()
    with TrainingDisplay(Console(file=stream, width=200), steps=82600, start=0.0) as display:
        display.advance(100, 0.25)  # a quarter of the minutes: those steps will never be run
        display.report(100, VALUES)
    with TrainingDisplay(Console(file=stream, width=200), steps=30, start=0.0) as display:
        for step in range(1, 30):
            display.advance(step, step / 30)
            display.report(step, VALUES)
    told = stream.getvalue()
    assert "step 100 (25% of the time limit)" in told
    assert "82600" not in told
    assert told.count("of the time limit") == 1
    assert "step 29/30" in told


def test_a_live_bar_on_a_terminal():
    stream = io.StringIO()
    console = Console(file=stream, width=160, force_terminal=True)
    with TrainingDisplay(console, steps=10, start=0.0) as display:
        display.advance(5, 0.5)
        display.report(5, VALUES)
        display.say("evaluated")
    text = stream.getvalue()
    for part in ("training", "step 5/10", "loss 2.346", "tf-acceptance 1.80", "12,346 tok/s", "left", "evaluated"):
        assert part in text
