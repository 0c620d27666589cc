"""The target's state in plain decoding: a left-padded batch on transformers' own cache, one token a pass.

It is kept apart from block decoding's state (``rollback``), because it is the reference: masks and positions are the
model's own. But it has the same advantages, so that a speed-up is measured against plain decoding at its best: keys and
values are written into buffers instead of being copied for each token, and the recurrent layers run as short blocks
where those have proven themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import cache_utils

from slipstream.decoding.ragged import round_up
from slipstream.decoding.short_states import ShortPass

if TYPE_CHECKING:
    from slipstream.decoding.prefill import DecoderCall, Prefilled


class BufferLayer(cache_utils.DynamicLayer):
    """A DynamicLayer that writes into room behind what it holds: no copy of all keys for each token.

    ``keys`` and ``values`` are views ``[R, kv heads, T, D]`` of buffers with ``capacity`` columns. More than that fit
    too, after one copy.
    """

    keys: Tensor  # type: ignore[assignment]
    values: Tensor  # type: ignore[assignment]

    def __init__(self, keys: Tensor, values: Tensor, capacity: int) -> None:
        super().__init__()
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
        self._capacity = capacity
        self._take(keys, values)

    def _take(self, keys: Tensor, values: Tensor) -> None:
        """Copy keys and values into fresh buffers."""
        rows, heads, length, _ = keys.shape
        self._capacity = max(self._capacity, round_up(length))
        self._buffers = [x.new_empty(rows, heads, self._capacity, x.shape[-1]) for x in (keys, values)]
        self.keys, self.values = (buffer[:, :, :length] for buffer in self._buffers)
        self.keys.copy_(keys)
        self.values.copy_(values)

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append ``[R, kv heads, Q, D]`` and return everything."""
        start = self.keys.shape[2]
        end = start + key_states.shape[2]
        if end > self._capacity:
            self._capacity = round_up(2 * end)
            self._take(self.keys, self.values)
        self.keys, self.values = (buffer[:, :, :end] for buffer in self._buffers)
        self.keys[:, :, start:] = key_states
        self.values[:, :, start:] = value_states
        return self.keys, self.values

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep the rows ``beam_idx``."""
        self._take(self.keys.index_select(0, beam_idx), self.values.index_select(0, beam_idx))


class StepState:
    """One batch's state between steps, up to ``limit`` of them. Enter it as a context. One per GPU thread."""

    def __init__(self, call: DecoderCall, prefilled: Prefilled, limit: int) -> None:
        device = call.target.device
        self._call, self._cache = call, prefilled.cache
        self._positions = torch.tensor(prefilled.lengths, device=device)[:, None]
        self._width = max(prefilled.lengths)
        self._mask = prefilled.mask
        if self._mask is not None:
            self._mask = torch.cat([self._mask, self._mask.new_ones(len(prefilled.lengths), limit)], dim=1)
        self._steps = 0
        recurrent = []
        for number, layer in enumerate(self._cache.layers):
            if type(layer) is cache_utils.DynamicLayer and layer.keys is not None and layer.values is not None:
                self._cache.layers[number] = BufferLayer(layer.keys, layer.values, round_up(self._width + limit))
            elif type(layer) is cache_utils.LinearAttentionLayer:
                recurrent.append(number)
        short = call.short_blocks
        self._short = ShortPass(short, self._cache) if short.cover(self._cache, recurrent) else None

    def __enter__(self) -> StepState:
        if self._short is not None:
            self._short.install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._short is not None:
            self._short.remove()

    def step(self, tokens: Tensor) -> Tensor:
        """Append ``tokens [R]`` and return the states after the final norm ``[R, H]``."""
        self._steps += 1
        seen = None if self._mask is None else self._mask[:, : self._width + self._steps]
        if self._short is not None:
            self._short.begin(1)
        positions = self._positions + (self._steps - 1)
        hidden = self._call(tokens[:, None], positions=positions, mask=seen, cache=self._cache)
        if self._short is not None:
            self._short.commit([1] * len(tokens))
        return hidden[:, -1]

    def keep(self, rows: Sequence[int]) -> None:
        """Drop every row that is not in ``rows``."""
        kept = torch.tensor(rows, device=self._positions.device)
        self._cache.reorder_cache(kept)
        self._positions = self._positions[kept]
        self._mask = None if self._mask is None else self._mask[kept]
