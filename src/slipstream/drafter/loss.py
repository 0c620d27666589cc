"""Weighted cross-entropy over the target's frozen head: a plain reference, and a chunked form without full logits.

loss_sum = sum over valid slots of w * CE(hidden . head^T, label); the caller divides by the weights of the whole
optimizer step. Slot weights: ``decay``: w_k = exp(-(k-1)/gamma), k = 1..B-1 (arXiv 2602.06036, eq. 4). ``dpace``
(arXiv 2605.18810): q_i = (1-alpha) exp(-CE_i) + alpha, without gradient; w_j = sum over valid m >= j of the product of
q_i over valid i <= m: how much of the expected accepted length hangs on slot j.

Letters: M blocks, B block size, V embedding rows, H hidden size; slots are rows, M*(B-1) of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Weighting = Literal["decay", "dpace"]
LOGIT_BYTES = 256 * 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class LossParts:
    """loss_sum float32 0-d (carries the gradient); weight_sum float32 0-d; nll float32 and argmax int64 [M, B-1]."""

    loss_sum: Tensor
    weight_sum: Tensor
    nll: Tensor
    argmax: Tensor


def decay_weights(block_size: int, gamma: float, device: torch.device | str | None = None) -> Tensor:
    """Return float32 [B-1]: exp(-(k-1)/gamma) for slots k = 1..B-1."""
    return torch.exp(torch.arange(block_size - 1, dtype=torch.float32, device=device) / -gamma)


def dpace_weights(nll: Tensor, valid: Tensor, alpha: float) -> Tensor:
    """Return float32 [M, B-1] D-PACE weights of nll [M, B-1]; invalid slots multiply by 1, add 0, and weigh 0."""
    confidence = (1.0 - alpha) * torch.exp(-nll.detach().float()) + alpha
    reach = torch.where(valid, confidence, 1.0).cumprod(-1) * valid
    return reach.flip(-1).cumsum(-1).flip(-1) * valid


def _weights(nll: Tensor, valid: Tensor, weighting: Weighting, gamma: float, alpha: float) -> Tensor:
    """Return float32 [M, B-1] weights; 0 on invalid slots."""
    if weighting == "dpace":
        return dpace_weights(nll, valid, alpha)
    return decay_weights(nll.shape[-1] + 1, gamma, nll.device) * valid


def naive_loss(
    hidden: Tensor,
    head_weight: Tensor,
    labels: Tensor,
    valid: Tensor,
    *,
    block_size: int,
    weighting: Weighting = "decay",
    gamma: float = 7.0,
    alpha: float = 0.5,
) -> LossParts:
    """Return the loss with every logit in memory, differentiated by autograd: the reference of ``chunked_loss``."""
    slots = block_size - 1
    labels, valid = labels.reshape(-1, slots), valid.reshape(-1, slots)
    with torch.autocast(hidden.device.type, enabled=False):
        logits = F.linear(hidden.reshape(-1, hidden.shape[-1]).to(head_weight.dtype), head_weight).float()
    nll = F.cross_entropy(logits, labels.reshape(-1), reduction="none").view(-1, slots)
    weights = _weights(nll.detach(), valid, weighting, gamma, alpha)
    return LossParts(
        # where(), not a product with 0: an invalid slot's loss is not looked at.
        loss_sum=torch.where(valid, weights * nll, 0.0).sum(),
        weight_sum=weights.sum(),
        nll=nll.detach(),
        argmax=logits.detach().argmax(-1).view(-1, slots),
    )


class _FrozenHeadLoss(torch.autograd.Function):
    """Forms the gradient of the hidden states during forward, chunk by chunk, in the memory of the logits."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        labels: Tensor,
        valid: Tensor,
        settings: tuple[Weighting, float, float],
        blocks: int,
        differentiate: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        slots = labels.shape[1]
        nll = torch.empty(labels.shape, dtype=torch.float32, device=hidden.device)
        weights = torch.empty_like(nll)
        argmax = torch.empty_like(labels)
        gradient = torch.empty_like(hidden) if differentiate else hidden.new_empty(0)
        for first in range(0, labels.shape[0], blocks):
            part = slice(first, min(first + blocks, labels.shape[0]))
            rows = slice(part.start * slots, part.stop * slots)
            # float() is the same memory for a float32 head, a copy for a half one. What follows happens in place.
            logits = torch.mm(hidden[rows].to(head.dtype), head.t()).float()
            label = labels[part].reshape(-1, 1)
            top, index = logits.max(-1, keepdim=True)
            argmax[part] = index.view(-1, slots)
            right = logits.gather(1, label) - top
            total = logits.sub_(top).exp_().sum(-1, keepdim=True)
            nll[part] = (total.log() - right).view(-1, slots)
            weights[part] = _weights(nll[part], valid[part], *settings)
            if differentiate:
                weight = weights[part].reshape(-1, 1)
                logits.mul_(weight / total).scatter_add_(1, label, -weight)
                gradient[rows] = torch.mm(logits.to(head.dtype), head).to(gradient.dtype)
        ctx.save_for_backward(gradient)
        loss_sum = torch.where(valid, weights * nll, 0.0).sum()
        weight_sum = weights.sum()
        ctx.mark_non_differentiable(weight_sum, nll, argmax)
        return loss_sum, weight_sum, nll, argmax

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * outer[0].to(gradient.dtype), None, None, None, None, None, None


def chunk_rows(vocab_rows: int) -> int:
    """Return how many rows of float32 logits make about 256 MiB; at least one."""
    return max(1, LOGIT_BYTES // (4 * vocab_rows))


def blocks_per_chunk(chunk: int, block_size: int, head_weight: Tensor) -> int:
    """Return how many whole blocks fit in ``chunk`` rows of logits (0: about 256 MiB of them); at least one."""
    rows = chunk or chunk_rows(head_weight.shape[0])
    return max(1, rows // (block_size - 1))


def chunked_loss(
    hidden: Tensor,
    head_weight: Tensor,
    labels: Tensor,
    valid: Tensor,
    *,
    block_size: int,
    weighting: Weighting = "decay",
    gamma: float = 7.0,
    alpha: float = 0.5,
    chunk: int = 0,
) -> LossParts:
    """Return the loss with at most ``chunk`` rows of logits in memory (0: about 256 MiB); whole blocks, at least one.

    hidden [M*(B-1), H] (any leading shape), slots 1..B-1 of each block; head_weight [V, H], frozen: it gets no
    gradient; labels int64 and valid bool, M*(B-1) elements in any shape. Products are in the head's dtype, whatever
    autocast says; softmax, weights and sums in float32. No valid slot: zero loss, weight and gradient, all finite. No
    host sync. Thread-safe.
    """
    slots = block_size - 1
    labels, valid = labels.reshape(-1, slots), valid.reshape(-1, slots)
    flat = hidden.reshape(-1, hidden.shape[-1])
    differentiate = torch.is_grad_enabled() and flat.requires_grad
    blocks = blocks_per_chunk(chunk, block_size, head_weight)
    with torch.autocast(hidden.device.type, enabled=False):
        loss_sum, weight_sum, nll, argmax = _FrozenHeadLoss.apply(
            flat, head_weight.detach(), labels, valid, (weighting, gamma, alpha), blocks, differentiate
        )
    return LossParts(loss_sum=loss_sum, weight_sum=weight_sum, nll=nll, argmax=argmax)
