"""Keys and values of a batch whose rows have different lengths: one buffer a layer, in which index equals position.

Rolling a row back is forgetting. Rejected entries lie at or after the row's next position: they are masked until then,
and the next pass overwrites them. Nothing is copied or moved, and rows accept different counts at no cost.

Shape letters: R rows, Q block tokens, C buffer columns, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

ROUND = 32
"""Buffer widths are multiples of this: fewer distinct shapes for kernels that tune per shape, and aligned masks."""


def round_up(size: int) -> int:
    """Return ``size`` rounded up to a buffer width."""
    return -(-size // ROUND) * ROUND


@dataclass(slots=True)
class Cursor:
    """Where the running pass writes and how far it may look; one object shared by all layers of a batch.

    positions ``[R, Q]`` int64; rows ``[R, 1]`` int64; low: smallest first position, high: largest last position + 1
    (host).
    """

    positions: Tensor
    rows: Tensor
    low: int = 0
    high: int = 0

    def span(self, window: int | None, capacity: int) -> tuple[int, int]:
        """Return the buffer columns [start, end) that a layer with ``window`` (None: all) must see."""
        start = 0 if window is None else max(0, self.low - window + 1) // ROUND * ROUND
        return start, min(round_up(self.high), capacity)

    def allowed(self, window: int | None, capacity: int) -> Tensor:
        """Return the mask bool ``[R, 1, Q, columns]`` of a layer with ``window``, over the columns of its span."""
        start, end = self.span(window, capacity)
        query = self.positions[:, None, :, None]
        key = torch.arange(start, end, device=self.positions.device)
        allowed = key <= query
        if window is not None:
            allowed &= key > query - window
        return allowed


class RaggedLayer(CacheLayerMixin):
    """Keys and values of one attention layer, ``[R, kv heads, C, D]``, index equal to position. One per GPU thread."""

    is_sliding = False
    is_croppable = False
    keys: Tensor  # type: ignore[assignment]
    values: Tensor  # type: ignore[assignment]

    def __init__(self, keys: Tensor, values: Tensor, cursor: Cursor, window: int | None) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.cursor, self.window = cursor, window
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the buffers exist."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write ``[R, kv heads, Q, D]`` at the cursor's positions and return the columns that the mask covers."""
        cursor = self.cursor
        self.keys[cursor.rows, :, cursor.positions] = key_states.transpose(1, 2)
        self.values[cursor.rows, :, cursor.positions] = value_states.transpose(1, 2)
        start, end = cursor.span(self.window, self.keys.shape[2])
        return self.keys[:, :, start:end], self.values[:, :, start:end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return (columns, first column) of the running pass."""
        start, end = self.cursor.span(self.window, self.keys.shape[2])
        return end - start, start

    def get_seq_length(self) -> int:
        """Return the end of the longest row's block."""
        return self.cursor.high

    def get_max_length(self) -> int:
        """Return the buffer's columns."""
        return self.keys.shape[2]

    def keep(self, rows: Tensor) -> None:
        """Drop every row that is not in ``rows``."""
        self.keys, self.values = self.keys[rows], self.values[rows]


def buffer_of(states: Tensor, source: Tensor, capacity: int) -> Tensor:
    """Return a buffer of ``capacity`` columns whose front holds ``states`` gathered by ``source`` ``[R, 1, T, 1]``.

    The rest is zeroed: a NaN in memory that was never written would pass a mask as 0 * NaN.
    """
    rows, heads, _, size = states.shape
    buffer = states.new_zeros(rows, heads, capacity, size)
    buffer[:, :, : source.shape[2]] = states.gather(2, source.expand(rows, heads, -1, size))
    return buffer
