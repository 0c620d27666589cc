"""What counts as a loop."""

from __future__ import annotations

import numpy as np
import pytest

from slipstream.data.loops import loop_period


def plain_loop_period(ids: list[int], longest: int) -> int | None:
    """The definition, word for word."""
    for period in range(1, longest + 1):
        span = max(3 * period, 24)
        for start in range(len(ids) - span + 1):
            window = ids[start : start + span]
            if all(window[i] == window[i - period] for i in range(period, span)):
                return period
    return None


@pytest.mark.parametrize(
    ("ids", "period"),
    [
        ([7] * 24, 1),
        ([7] * 23, None),
        ([1, 2, 3] * 8, 3),
        ([9, 9, 9, *([1, 2, 3] * 8), 4, 5], 3),
        ([*range(8)] * 3, 8),
        ([*range(9)] * 3, None),
        ([], None),
        (list(range(100)), None),
    ],
)
def test_at_period_eight(ids: list[int], period: int | None) -> None:
    assert loop_period(ids, 8) == period


def test_a_line_of_up_to_24_tokens() -> None:
    assert loop_period([*range(24)] * 3, 24) == 24
    assert loop_period([*range(24)] * 3, 23) is None
    assert loop_period([*range(24)] * 2 + [*range(23)], 24) is None


def test_as_the_definition_says_on_random_ids() -> None:
    random = np.random.default_rng(0)
    found = set()
    for _ in range(300):
        period = int(random.integers(1, 12))
        piece = random.integers(0, 3, period).tolist()
        ids = (
            random.integers(0, 3, 10).tolist() + piece * int(random.integers(1, 12)) + random.integers(0, 3, 9).tolist()
        )
        assert loop_period(ids, 10) == plain_loop_period(ids, 10)
        found.add(loop_period(ids, 10))
    assert {None, 1, 5, 10} <= found
