"""Who attends to whom, in two forms: a dense boolean mask (exact reference) and flex attention's BlockMask, computed.

::

              context j (C)               blocks (N x B)
            . . . . . . . . . . . .   b0       b1       b2
    b0      x x x . . . . . . . . .   x x x    . . .    . . .      context: own document, strictly before the anchor
    b1      x x x x x x . . . . . .   . . .    x x x    . . .      block: its own, both ways (full layers)
    b2      . . . . . . . . x x . .   . . .    . . .    x x x      or up to the query (sliding layers)

The feature at the anchor does not exist when a block is drafted: ``j < anchor``, never ``<=``. A sliding layer of
window W also needs p-j <= W-1 for a query at p = anchor + slot, and is causal inside its block: the rule that SGLang
and vLLM apply to sliding layers. A padded block sees only itself, so that no row of scores is empty (a softmax of
nothing is NaN). Where blocks have lengths of their own, no query sees the slots behind its block's.

Letters: R rows, C context tokens of a row, N blocks of a row, B block size, Q = N*B. All indices are within a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.compilation.guard import compiled_flex_attention
from slipstream.drafter.config import DrafterConfig
from slipstream.errors import DrafterError

TILE = 128
LEAST_HEAD_DIM = 16  # of flex attention's matrix products

Predicate = Callable[[Any, Any, Any, Any], Any]


class Attention(Protocol):
    """What ``DraftModel.forward`` calls once per layer."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [R, heads, Q, d], k and v [R, kv_heads, C+Q, d], all rotated -> [R, heads, Q, d]."""
        ...


class RefreshableAttention(Attention, Protocol):
    """Attention whose mask follows the anchors of each step."""

    kind: str

    def update(self, anchors: Tensor, document_start: Tensor, keep: Tensor, length: Tensor | None = None) -> None:
        """Take a step's blocks: anchors, document_start, length int64 [R, N], keep bool [R, N]. No host sync."""
        ...


def predicate(
    low: Tensor, high: Tensor, context: int, block_size: int, window: int, length: Tensor | None = None
) -> Predicate:
    """Return ``allow(row, head, query, key)`` over int32 [R, N] bounds: a block's context is low <= j < high.

    ``length`` int32 [R, N]: of a block's own slots only the first so many are seen; None: all.

    The indices may be scalars (flex traces it) or tensors that broadcast (``dense_mask``).
    """

    def allow(row: Any, head: Any, query: Any, key: Any) -> Any:
        block, slot = query // block_size, query % block_size
        end = high[row, block]
        seen = (key < context) & (key >= low[row, block]) & (key < end)
        own = (key >= context) & ((key - context) // block_size == block)
        if window:
            seen = seen & (end + slot - key < window)
            own = own & ((key - context) % block_size <= slot)
        if length is not None:
            own = own & ((key - context) % block_size < length[row, block])
        return seen | own

    return allow


def context_bounds(anchors: Tensor, document_start: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    """Return int32 (low, high) [R, N] of the context that each block sees; a padded block's is empty."""
    low = torch.where(keep, document_start, 0).to(torch.int32)
    high = torch.where(keep, anchors, 0).to(torch.int32)
    return low, high


def dense_mask(
    anchors: Tensor,
    document_start: Tensor,
    keep: Tensor,
    *,
    context: int,
    block_size: int,
    window: int = 0,
    length: Tensor | None = None,
) -> Tensor:
    """Return the mask as bool [R, Q, C+Q] (True: attend), by evaluating the predicate everywhere."""
    low, high = context_bounds(anchors, document_start, keep)
    rows, blocks = anchors.shape
    queries = blocks * block_size
    allow = predicate(low, high, context, block_size, window, length)
    row = torch.arange(rows, device=anchors.device)[:, None, None]
    query = torch.arange(queries, device=anchors.device)[None, :, None]
    key = torch.arange(context + queries, device=anchors.device)[None, None, :]
    mask: Tensor = allow(row, None, query, key)
    return mask


class DenseAttention:
    """Scaled dot-product attention under the whole boolean mask: exact, any device, memory R*Q*(C+Q) bytes a mask.

    One per GPU thread.
    """

    kind = "dense"

    def __init__(self, config: DrafterConfig, context: int) -> None:
        self._config = config
        self._context = context
        self._masks: dict[int, Tensor] = {}

    def update(self, anchors: Tensor, document_start: Tensor, keep: Tensor, length: Tensor | None = None) -> None:
        """Build the masks of a step's blocks; see RefreshableAttention."""
        self._masks = {
            window: dense_mask(
                anchors,
                document_start,
                keep,
                context=self._context,
                block_size=self._config.block_size,
                window=window,
                length=length,
            )[:, None]
            for window in sorted({self._config.window(layer) for layer in range(self._config.layers)})
        }

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend; see Attention. ``update`` comes first."""
        return masked_attention(q, k, v, self._masks[self._config.window(layer)])


def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attend under a boolean mask (True: attend) with grouped heads; None sees everything."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


class TileMask:
    """A BlockMask whose index tensors are refreshed in place, from interval arithmetic instead of the predicate.

    A query sees at most two runs of keys: its context [low, high) and its own block. How many keys of a tile it sees is
    the overlap of two intervals, so a tile's count is a sum of 128 overlaps; 0 is skipped, 128*128 is full, anything
    between is partial. The own-block part never changes and is counted once. The index tensors equal those that
    ``create_block_mask`` makes from the predicate, at 1/128 of its work and memory.

    ``lengths``: blocks may have lengths of their own. That hides some pairs of a tile which is partial anyway, since a
    block is shorter than a tile: the counts take all slots as seen, and sort the tiles as the predicate would.

    The tensors are static, so that a compiled graph never sees new ones. Backward reads them too: call ``update`` only
    after the backward pass of the forward that used them.
    """

    def __init__(
        self,
        rows: int,
        context: int,
        blocks: int,
        block_size: int,
        window: int,
        device: torch.device,
        *,
        lengths: bool = False,
    ) -> None:
        from torch.nn.attention.flex_attention import BlockMask

        queries = blocks * block_size
        self.window, self._slots = window, block_size
        self.query_tiles = -(-queries // TILE)
        self.key_tiles = -(-(context + queries) // TILE)

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        if lengths and block_size >= TILE:
            raise DrafterError(f"blocks of {block_size} slots may not have lengths of their own; use less than {TILE}")
        self.low, self.high = zeros(rows, blocks), zeros(rows, blocks)
        self.length = zeros(rows, blocks) + block_size if lengths else None
        index = torch.arange(self.query_tiles * TILE, device=device, dtype=torch.int32)
        self._real = index < queries
        self._slot = index % block_size
        self._block = (index // block_size).clamp(max=blocks - 1).long()
        tile = torch.arange(self.key_tiles, device=device, dtype=torch.int32) * TILE
        self._tile_start = tile[: -(-context // TILE)]
        self._tile_end = (self._tile_start + TILE).clamp(max=context)

        own_start = context + self._block.to(torch.int32) * block_size
        own_end = own_start + (self._slot + 1 if window else block_size)
        own = (torch.minimum(own_end[:, None], tile + TILE) - torch.maximum(own_start[:, None], tile)).clamp(min=0)
        own = own * self._real[:, None]
        self._own = own.view(self.query_tiles, TILE, self.key_tiles).sum(1, dtype=torch.int32)

        # (count, index) of partial and full tiles: keys of each query tile, then queries of each key tile.
        q, k = self.query_tiles, self.key_tiles
        self._by_query = [(zeros(rows, 1, q), zeros(rows, 1, q, k)) for _ in range(2)]
        self._by_key = [(zeros(rows, 1, k), zeros(rows, 1, k, q)) for _ in range(2)]
        (part_kv, part_kv_at), (full_kv, full_kv_at) = self._by_query
        (part_q, part_q_at), (full_q, full_q_at) = self._by_key
        self.block_mask = BlockMask(
            seq_lengths=(queries, context + queries),
            kv_num_blocks=part_kv,
            kv_indices=part_kv_at,
            full_kv_num_blocks=full_kv,
            full_kv_indices=full_kv_at,
            q_num_blocks=part_q,
            q_indices=part_q_at,
            full_q_num_blocks=full_q,
            full_q_indices=full_q_at,
            BLOCK_SIZE=(TILE, TILE),
            mask_mod=predicate(self.low, self.high, context, block_size, window, self.length),
        )

    def tile_counts(self, low: Tensor, high: Tensor) -> Tensor:
        """Return int32 [R, query tiles, key tiles]: visible pairs in each tile."""
        rows = low.shape[0]
        end = high[:, self._block] * self._real
        start = low[:, self._block]
        if self.window:
            start = torch.maximum(start, end + self._slot - self.window + 1)
        seen = torch.minimum(end[..., None], self._tile_end) - torch.maximum(start[..., None], self._tile_start)
        seen = seen.clamp(min=0).view(rows, self.query_tiles, TILE, -1).sum(2, dtype=torch.int32)
        return F.pad(seen, (0, self.key_tiles - seen.shape[-1])) + self._own

    @torch.no_grad()
    def update(self, anchors: Tensor, document_start: Tensor, keep: Tensor, length: Tensor | None = None) -> None:
        """Refresh every index tensor in place; without ``length`` all slots are there. No host sync, no new shapes.

        Raises DrafterError for lengths where none were expected: the compiled mask would not look at them.
        """
        if self.length is not None:
            self.length.fill_(self._slots) if length is None else self.length.copy_(length)
        elif length is not None:
            raise DrafterError("blocks have lengths of their own, but this attention was built without; pass lengths")
        low, high = context_bounds(anchors, document_start, keep)
        self.low.copy_(low)
        self.high.copy_(high)
        counts = self.tile_counts(self.low, self.high)[:, None]
        full = counts == TILE * TILE
        partial = (counts > 0) & ~full
        for kind, tiles in enumerate((partial, full)):
            for (number, at), mask in ((self._by_query[kind], tiles), (self._by_key[kind], tiles.transpose(-2, -1))):
                number.copy_(mask.sum(-1))
                # Visible tiles first, each group in rising order.
                at.copy_(torch.argsort((~mask).to(torch.int8), dim=-1, stable=True))


class FlexAttention:
    """Compiled, block-sparse flex attention; GPU. Work follows the visible tiles. One per GPU thread."""

    kind = "flex"

    def __init__(
        self,
        config: DrafterConfig,
        rows: int,
        context: int,
        blocks: int,
        device: torch.device,
        *,
        lengths: bool = False,
    ) -> None:
        self._windows = [config.window(layer) for layer in range(config.layers)]
        self.masks = {
            window: TileMask(rows, context, blocks, config.block_size, window, device, lengths=lengths)
            for window in sorted(set(self._windows))
        }
        self._attend = compiled_flex_attention()

    def update(self, anchors: Tensor, document_start: Tensor, keep: Tensor, length: Tensor | None = None) -> None:
        """Refresh the masks in place; only after the backward pass of the step before. See RefreshableAttention."""
        for mask in self.masks.values():
            mask.update(anchors, document_start, keep, length)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend; see Attention. ``update`` comes first."""
        out: Tensor = self._attend(q, k, v, self.masks[self._windows[layer]].block_mask)
        return out


def build_attention(
    kind: Literal["auto", "flex", "dense"],
    config: DrafterConfig,
    rows: int,
    context: int,
    blocks: int,
    device: torch.device | str,
    *,
    lengths: bool = False,
) -> RefreshableAttention:
    """Return the attention of a run: R rows of C context tokens and N blocks. auto is flex on CUDA, else dense.

    ``lengths``: blocks may have lengths of their own.

    The choice is the attribute ``kind``. Raises DrafterError for flex without CUDA, which has no backward pass there,
    and for heads that are too small for it.
    """
    device = torch.device(device)
    if kind == "flex" and device.type != "cuda":
        raise DrafterError(f"training.attention is flex, but the device is {device}; use auto or dense")
    if kind not in ("auto", "flex", "dense"):
        raise DrafterError(f"training.attention is {kind!r}; use auto, flex or dense")
    if kind == "dense" or device.type != "cuda":
        return DenseAttention(config, context)
    if config.head_dim < LEAST_HEAD_DIM:
        raise DrafterError(
            f"drafter.head_dim is {config.head_dim}; compiled flex attention needs at least {LEAST_HEAD_DIM}: raise "
            "it, or set training.attention = dense"
        )
    return FlexAttention(config, rows, context, blocks, device, lengths=lengths)
