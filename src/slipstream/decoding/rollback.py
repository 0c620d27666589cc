"""The target's state in block decoding, and its exact rollback after each verify pass.

A verify pass runs a block of Q tokens on every row; row r then keeps ``counts[r]`` of them. Keys and values are
forgotten (``ragged``), recurrent states are set to those after what was kept (``recurrent``). The target sees an
explicit mask for each layer kind (full, or windowed by true positions), put in place by hooks on its decoder layers,
because no mask that a model builds itself can start at another position in every row.

Shape letters: R rows, Q block tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import cache_utils

from slipstream.decoding.ragged import Cursor, RaggedLayer, buffer_of, round_up
from slipstream.decoding.recurrent import RecurrentStates
from slipstream.errors import DecodingError
from slipstream.target.families import text_config

if TYPE_CHECKING:
    from slipstream.decoding.prefill import DecoderCall, Prefilled

_CHUNKED = "chunked_attention"


class TargetState:
    """The state of one batch between passes. Enter it as a context: it hooks the target's layers. One per GPU thread.

    ``starts``: each row's next position, on the host. Raises DecodingError for a target whose layers keep a state
    that is not known to roll back, or whose attention implementation cannot take a mask. ``short`` and ``calculate``
    False leave out the quicker ways of the recurrent layers (``recurrent``), for comparison.
    """

    def __init__(
        self, call: DecoderCall, prefilled: Prefilled, capacity: int, *, short: bool = True, calculate: bool = True
    ) -> None:
        self.starts = list(prefilled.lengths)
        self._call, self._cache = call, prefilled.cache
        self._device = call.target.device
        self._limit = call.target.info.max_positions
        self._capacity = round_up(capacity)
        rows = torch.arange(len(self.starts), device=self._device)[:, None]
        self._cursor = Cursor(positions=rows, rows=rows)
        self._windows: dict[int, int | None] = {}
        self._masks: dict[int | None, Tensor] | None = None
        self._handles: list[Any] = []
        config = text_config(call.target.model.config)
        self._attention = str(getattr(config, "_attn_implementation", ""))
        if self._attention not in ("sdpa", "eager"):
            raise DecodingError(
                f"target.attention is {self._attention}, which cannot take the mask of block decoding; use sdpa or "
                f"eager"
            )
        if _CHUNKED in (getattr(config, "layer_types", None) or ()) or getattr(config, "num_kv_shared_layers", None):
            raise DecodingError(
                f"target {call.target.info.name} has chunked attention or layers that share keys, "
                "which block decoding cannot roll back; use a target with full, sliding-window or linear attention"
            )
        blocks = call.short_blocks if short else None
        self._recurrent = RecurrentStates(self._cache, self._adopt(prefilled), short=blocks, calculate=calculate)

    def _adopt(self, prefilled: Prefilled) -> list[int]:
        """Move left-padded keys and values into ragged buffers; return the recurrent layers, whose states stay."""
        recurrent = []
        layers = self._cache.layers
        columns = torch.arange(max(prefilled.lengths), device=self._device)[None, :]
        for number, layer in enumerate(layers):
            kind = type(layer)
            if kind is cache_utils.LinearAttentionLayer:
                recurrent.append(number)
                continue
            sliding = kind is cache_utils.DynamicSlidingWindowLayer
            if not (sliding or kind is cache_utils.DynamicLayer) or not layer.is_initialized:
                raise DecodingError(
                    f"layer {number} of the target keeps a {kind.__name__}, which block decoding cannot roll back; "
                    "use a target with full, sliding-window or linear attention"
                )
            window = int(layer.sliding_window) if sliding else None
            held = layer.keys.shape[2]
            # A windowed layer kept its newest columns only; what it dropped lies outside every later window.
            source = columns + prefilled.pads[:, None] - (columns.shape[1] - held)
            source = source.clamp_(0, held - 1)[:, None, :, None]
            keys, values = (buffer_of(states, source, self._capacity) for states in (layer.keys, layer.values))
            layers[number] = RaggedLayer(keys, values, self._cursor, window)
            self._windows[number] = window
        return recurrent

    def __enter__(self) -> TargetState:
        for number, layer in enumerate(self._call.target.parts.layers):
            self._handles.append(layer.register_forward_pre_hook(self._mask_hook(number), with_kwargs=True))
        self._handles.extend(self._recurrent.hook(self._call.target.parts.layers))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _mask_hook(self, number: int) -> Any:
        """Return a pre-hook that gives decoder layer ``number`` the mask of its kind (none for a recurrent one)."""

        def hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if self._masks is None:
                return None
            if "attention_mask" not in kwargs:
                raise DecodingError(
                    f"layer {number} of the target is called without a named attention_mask, so block decoding cannot "
                    "set it; this family is not supported"
                )
            mask = self._masks[self._windows[number]] if number in self._windows else None
            return args, {**kwargs, "attention_mask": mask}

        return hook

    def verify(self, block: Tensor) -> Tensor:
        """Run ``block`` ``[R, Q]`` after each row's kept tokens; return states after the final norm ``[R, Q, H]``.

        ``commit`` comes next: before it the recurrent layers may or may not have absorbed the block.
        """
        cursor, length = self._cursor, block.shape[1]
        starts = torch.tensor(self.starts, device=self._device)[:, None]
        cursor.positions = starts + torch.arange(length, device=self._device)
        cursor.low, cursor.high = min(self.starts), max(self.starts) + length
        self._recurrent.save(length)
        self._masks = {window: self._mask(window) for window in {None, *self._windows.values()}}
        # Slots past the target's last position can never be kept; they only must not index beyond its tables.
        positions = cursor.positions.clamp(max=self._limit - 1) if self._limit else cursor.positions
        try:
            # A four-dimensional mask is what keeps the model from building its own; the hooks put in each layer's.
            return self._call(block, positions=positions, mask=self._masks[None], cache=self._cache)
        finally:
            self._masks = None
            self._recurrent.stop_recording()

    def _mask(self, window: int | None) -> Tensor:
        """Return the mask of a layer kind: bool for sdpa, additive for eager."""
        allowed = self._cursor.allowed(window, self._capacity)
        if self._attention == "sdpa":
            return allowed
        dtype = self._call.target.dtype
        mask = torch.zeros(allowed.shape, dtype=dtype, device=self._device)
        return mask.masked_fill_(~allowed, torch.finfo(dtype).min)

    def commit(self, counts: Sequence[int]) -> None:
        """Keep the first ``counts[r]`` tokens of the last block in row r. 0 marks a row that has ended."""
        self.starts = [start + count for start, count in zip(self.starts, counts, strict=True)]
        self._recurrent.roll_back(counts, self._cursor.positions.shape[1], self._device)

    def keep(self, rows: Sequence[int]) -> None:
        """Drop every row that is not in ``rows``."""
        index = torch.tensor(rows, device=self._device)
        self.starts = [self.starts[i] for i in rows]
        self._cursor.rows = torch.arange(len(rows), device=self._device)[:, None]
        self._recurrent.forget()
        for layer in self._cache.layers:
            if isinstance(layer, RaggedLayer):
                layer.keep(index)
            else:
                layer.reorder_cache(index)
