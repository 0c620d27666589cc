"""Loops: responses in which the target says the same piece again and again, as small greedy models do.

They flatter acceptance and every free baseline, and teach a drafter to repeat. A response loops at period P if a piece
of at most P tokens follows itself three times or more, over 24 tokens or more. P = 8 finds phrases, P = 24 whole lines.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

TIMES, LEAST = 3, 24
PERIODS = (8, 24)


def loop_period(ids: Sequence[int], longest: int) -> int | None:
    """Return the smallest period, at most ``longest`` tokens, at which ``ids`` loops anywhere; None if it does not."""
    tokens = np.asarray(ids, dtype=np.int64)
    for period in range(1, longest + 1):
        needed = max(TIMES * period, LEAST) - period  # tokens that equal the one a period before
        if needed > len(tokens) - period:
            continue
        same = np.concatenate(([False], tokens[period:] == tokens[:-period], [False]))
        edges = np.flatnonzero(same[1:] != same[:-1])
        if len(edges) and int((edges[1::2] - edges[::2]).max()) >= needed:
            return period
    return None
