"""The answers of one batch of plain decoding while they grow, in arrays on the host: a step costs no loop over rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from slipstream.decoding.responses import Response, check_finite


class GrowingAnswers:
    """What the rows of a batch have written, one token a step. All have one limit and one set of stop tokens.

    A row that has ended may stay in the batch for a while; what is still computed for it is not looked at. ``done``:
    the finished responses, in the order in which they ended. Not thread-safe.
    """

    def __init__(self, rows: Sequence[Response]) -> None:
        self.done: list[Response] = []
        self._rows = list(rows)
        self._limit = rows[0].limit
        self._stops = np.fromiter(rows[0].eos_ids, dtype=np.int64)
        self._written = np.zeros((len(rows), self._limit), dtype=np.int64)
        self._length = 0
        self._places = np.arange(len(rows))  # of the batch's rows in what is written
        self.live = np.ones(len(rows), dtype=np.bool_)

    def take(self, tokens: NDArray[np.int64], finite: NDArray[np.bool_]) -> None:
        """Append a token to each row of the batch ``[R]``. Raises DecodingError where a live one is not ``finite``."""
        wrong = np.flatnonzero(self.live & ~finite)
        if len(wrong):
            check_finite(self._rows[self._places[wrong[0]]], False, self._length)
        self._written[self._places, self._length] = tokens
        self._length += 1
        ended = self.live if self._length == self._limit else self.live & np.isin(tokens, self._stops)
        for place in self._places[ended].tolist():
            response = self._rows[place]
            response.output = self._written[place, : self._length].tolist()
            response.finish = "eos" if response.output[-1] in response.eos_ids else "length"
            self.done.append(response)
        self.live = self.live & ~ended

    def keep(self, rows: Sequence[int]) -> None:
        """Drop every row of the batch that is not in ``rows``."""
        self._places, self.live = self._places[rows], self.live[rows]
