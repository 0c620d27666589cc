"""Anchors, and the blocks that they open: labels, supervision, positions and noise ids.

An anchor is a supervised token whose next token is supervised too and in the same document: when a block is drafted,
the anchor is always a token that the target itself wrote. Anchors are drawn uniformly without replacement, anew for
each pass. The number of blocks is fixed; rows with fewer valid anchors are padded with blocks that carry no loss.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.records import PADDING_DOCUMENT, PackedBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class Blocks:
    """The blocks of a micro-batch: R rows, N blocks a row, block size B.

    anchors int64 [R, N]: index in the row, rising; kept ones first, then padding (the row's last index).
    keep bool [R, N]: False for padding. labels int64 [R, N, B-1]: the token at anchor + k for slot k = 1..B-1 (not
    shifted). valid bool [R, N, B-1]: slots that carry loss: supervised without a hole since the anchor, and inside the
    anchor's document. noise_ids int64 [R, N, B]: the anchor's id, then mask tokens. positions int64 [R, N, B]: counted
    within the document. document_start int64 [R, N]: index in the row where the anchor's document begins. length int64
    [R, N]: slots of each block that are there, 2..B, the anchor's counted; the others are seen by none and carry no
    loss. None: all are there.
    """

    anchors: Tensor
    keep: Tensor
    labels: Tensor
    valid: Tensor
    noise_ids: Tensor
    positions: Tensor
    document_start: Tensor
    length: Tensor | None = None


def valid_anchors(batch: PackedBatch) -> Tensor:
    """Return bool [R, S]: tokens that may be anchors."""
    document, mask = batch.document_ids, batch.loss_mask
    pair = mask[:, :-1] & mask[:, 1:] & (document[:, :-1] == document[:, 1:]) & (document[:, :-1] != PADDING_DOCUMENT)
    return torch.cat((pair, torch.zeros_like(mask[:, :1])), 1)


def draw_anchors(valid: Tensor, anchors: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return (anchors int64 [R, N] rising, keep bool [R, N]), uniform over the valid tokens of each row.

    ``generator`` is a CPU generator: the draws are made there and moved (pinned, without a host sync), so that CPU and
    GPU choose the same anchors. They are float64: at float32 two of a row's draws are often equal, and ties are broken
    differently on each device.
    """
    rows, tokens = valid.shape
    draw = torch.rand(rows, tokens, dtype=torch.float64, generator=generator, pin_memory=valid.is_cuda)
    priority = draw.to(valid.device, non_blocking=True).masked_fill(~valid, -1.0)
    width = min(anchors, tokens)
    value, index = priority.topk(width, dim=1)
    index = index.masked_fill(value < 0, tokens - 1).sort(1).values
    # The last token of a row is never valid (no next token), so it can stand for padding.
    if width < anchors:
        index = torch.nn.functional.pad(index, (0, anchors - width), value=tokens - 1)
    return index, index < tokens - 1


def draw_lengths(
    rows: int, anchors: int, *, block_size: int, short_share: float, generator: torch.Generator, device: torch.device
) -> Tensor:
    """Return int64 [R, N]: 2..B-1 uniformly for a share of the blocks, B for the others. ``generator``: a CPU one."""
    pin = device.type == "cuda"
    draw = torch.rand(2, rows, anchors, dtype=torch.float64, generator=generator, pin_memory=pin)
    short, where = draw.to(device, non_blocking=True)
    shorter = 2 + (where * (block_size - 2)).long()
    return torch.where(short < short_share, shorter, block_size)


def blocks_at(
    batch: PackedBatch,
    anchors: Tensor,
    keep: Tensor,
    *,
    block_size: int,
    mask_token_id: int,
    length: Tensor | None = None,
) -> Blocks:
    """Return the blocks that given anchors [R, N] open; ``length``: as in ``Blocks``. No host sync."""
    rows, number = anchors.shape
    tokens = batch.ids.shape[1]
    offsets = torch.arange(1, block_size, device=anchors.device)
    wanted = anchors[..., None] + offsets
    inside = wanted < tokens
    at = wanted.clamp(max=tokens - 1).view(rows, -1)

    def gather(x: Tensor) -> Tensor:
        return x.gather(1, at).view(rows, number, block_size - 1)

    document = batch.document_ids.gather(1, anchors)
    right = inside & gather(batch.loss_mask) & (gather(batch.document_ids) == document[..., None]) & keep[..., None]
    # Nothing after the first hole: at inference a block that ran past a turn's end has no text to be right about.
    valid = right.to(torch.int32).cumprod(-1) > 0
    if length is not None:
        valid = valid & (offsets < length[..., None])
    anchor_ids = batch.ids.gather(1, anchors)
    noise = torch.full((rows, number, block_size), mask_token_id, dtype=torch.int64, device=anchors.device)
    noise[..., 0] = anchor_ids
    start = batch.positions.gather(1, anchors)
    return Blocks(
        anchors=anchors,
        keep=keep,
        labels=gather(batch.ids),
        valid=valid,
        noise_ids=noise,
        positions=start[..., None] + torch.arange(block_size, device=anchors.device),
        document_start=anchors - start,
        length=length,
    )


def label_sources(blocks: Blocks, tokens: int) -> Tensor:
    """Return int64 [R, N, B-1]: where in rows of ``tokens`` laid end to end, [R*S], the target predicts a slot's label.

    That is one token before it: anchor + k - 1 for slot k, in the anchor's document wherever the slot is valid.
    """
    rows, _, slots = blocks.labels.shape
    device = blocks.anchors.device
    inside = blocks.anchors[..., None] + torch.arange(slots, device=device)
    return inside.clamp(max=tokens - 1) + torch.arange(rows, device=device)[:, None, None] * tokens


def sample_blocks(
    batch: PackedBatch,
    *,
    anchors: int,
    block_size: int,
    mask_token_id: int,
    generator: torch.Generator,
    short_share: float = 0.0,
) -> Blocks:
    """Draw ``anchors`` blocks a row and return them, on the batch's device. No host sync, fixed shapes. Thread-safe.

    The same batch and CPU generator state give the same blocks on every device. Above 0, ``short_share`` of the blocks
    have a length of their own, which is drawn after the anchors: they stay those that they are without it.
    """
    index, keep = draw_anchors(valid_anchors(batch), anchors, generator)
    length = None
    if short_share > 0:
        length = draw_lengths(
            *index.shape, block_size=block_size, short_share=short_share, generator=generator, device=index.device
        )
    return blocks_at(batch, index, keep, block_size=block_size, mask_token_id=mask_token_id, length=length)
