"""Weighted cross-entropy over the target's frozen head: a plain reference, and a chunked form without full logits.

loss_sum = sum over valid slots of w * CE(label, softmax(hidden . head^T)); the caller divides by the weights of the
whole optimizer step. A hard label is the data's token. A soft label is the target's own distribution p there, at
temperature 1, or a mixture of both. CE = -sum_v label_v log softmax_v; its gradient is (softmax - label) . head. With
soft labels the cross-entropy is the loss, not the divergence: they differ by the entropy of p, which no drafter can
change and which costs a further pass over the logits, and of text drawn from p the hard loss is an unbiased estimate of
the soft one, so that both are on one scale.

Slot weights: ``decay``: w_k = exp(-(k-1)/gamma), k = 1..B-1 (arXiv 2602.06036, eq. 4). ``dpace`` (arXiv 2605.18810):
q_i = (1-alpha) exp(-CE_i) + alpha, without gradient; w_j = sum over valid m >= j of the product of q_i over valid
i <= m: how much of the expected accepted length hangs on slot j. Its CE_i is that of the data's token, whatever the
labels are: what is accepted is a token.

Letters: M blocks, B block size, V embedding rows, H hidden size; slots are rows, M*(B-1) of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Weighting = Literal["decay", "dpace"]
LOGIT_BYTES = 256 * 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class LossParts:
    """loss_sum float32 0-d (carries the gradient); weight_sum float32 0-d; nll float32 and argmax int64 [M, B-1].

    nll is the cross-entropy of the data's token, whatever the labels are; hard_sum float32 0-d: sum of w * nll.
    """

    loss_sum: Tensor
    weight_sum: Tensor
    nll: Tensor
    argmax: Tensor
    hard_sum: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class SoftLabels:
    """The target's own distribution at each slot: softmax(head(states[source])), without gradient.

    states [T, H]: the target's states after its final norm; source int64, M*(B-1) elements in any shape: the row of
    ``states`` that predicts a slot's token, also for invalid slots; head: states [n, H] to the target's logits [n, V],
    new ones, scaled and capped as the target does; share, 0 < share <= 1: of p in a label, the rest is the token.
    """

    states: Tensor
    source: Tensor
    head: Callable[[Tensor], Tensor]
    share: float = 1.0


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
    soft: SoftLabels | None = None,
) -> LossParts:
    """Return the loss with every logit in memory, differentiated by autograd: the reference of ``chunked_loss``."""
    slots = block_size - 1
    labels, valid = labels.reshape(-1, slots), valid.reshape(-1, slots)
    with torch.autocast(hidden.device.type, enabled=False):
        logits = F.linear(hidden.reshape(-1, hidden.shape[-1]).to(head_weight.dtype), head_weight).float()
    nll = F.cross_entropy(logits, labels.reshape(-1), reduction="none").view(-1, slots)
    weights = _weights(nll.detach(), valid, weighting, gamma, alpha)
    loss = nll
    if soft is not None:
        with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
            label = soft.head(soft.states[soft.source.reshape(-1)]).float().softmax(-1)
        loss = soft.share * F.cross_entropy(logits, label, reduction="none").view(-1, slots) + (1 - soft.share) * nll
    return LossParts(
        # where(), not a product with 0: an invalid slot's loss is not looked at.
        loss_sum=torch.where(valid, weights * loss, 0.0).sum(),
        weight_sum=weights.sum(),
        nll=nll.detach(),
        argmax=logits.detach().argmax(-1).view(-1, slots),
        hard_sum=torch.where(valid, weights * nll.detach(), 0.0).sum(),
    )


def _row_products(a: Tensor, b: Tensor) -> Tensor:
    """Return the dot product of each row, [n, 1], of two [n, V]: eight pieces, so that no third matrix exists."""
    return torch.cat([(x * y).sum(-1, keepdim=True) for x, y in zip(a.chunk(8), b.chunk(8), strict=True)])


class _FrozenHeadLoss(torch.autograd.Function):
    """Forms the gradient of the hidden states during forward, chunk by chunk, in the memory of the logits."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        labels: Tensor,
        valid: Tensor,
        soft: SoftLabels | None,
        settings: tuple[Weighting, float, float],
        blocks: int,
        differentiate: bool,
    ) -> tuple[Tensor, ...]:
        slots = labels.shape[1]
        share = 0.0 if soft is None else soft.share
        nll = torch.empty(labels.shape, dtype=torch.float32, device=hidden.device)
        loss, weights = torch.empty_like(nll), torch.empty_like(nll)
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
            logits.sub_(top)
            fitted = right  # sum over v of label_v * logit_v
            if soft is not None:
                wanted = soft.head(soft.states[soft.source.reshape(-1)[rows]]).float()
                wanted.sub_(wanted.amax(-1, keepdim=True)).exp_()
                scale = share / wanted.sum(-1, keepdim=True)  # share * p is wanted * scale
                fitted = _row_products(wanted, logits) * scale + (1 - share) * right
            total = logits.exp_().sum(-1, keepdim=True)
            nll[part] = (total.log() - right).view(-1, slots)
            loss[part] = (total.log() - fitted).view(-1, slots)
            weights[part] = _weights(nll[part], valid[part], *settings)
            if differentiate:
                weight = weights[part].reshape(-1, 1)
                logits.mul_(weight / total)
                if soft is not None:
                    logits.addcmul_(wanted, weight * scale, value=-1)
                    del wanted
                if share < 1:
                    logits.scatter_add_(1, label, weight * (share - 1))
                gradient[rows] = torch.mm(logits.to(head.dtype), head).to(gradient.dtype)
            del logits  # or it would lie beside the next chunk's
        ctx.save_for_backward(gradient)
        loss_sum, hard_sum = (torch.where(valid, weights * x, 0.0).sum() for x in (loss, nll))
        others = (weights.sum(), nll, argmax, hard_sum)
        ctx.mark_non_differentiable(*others)
        return loss_sum, *others

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * outer[0].to(gradient.dtype), None, None, None, None, None, None, None


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
    soft: SoftLabels | None = None,
    chunk: int = 0,
) -> LossParts:
    """Return the loss with at most ``chunk`` rows of logits in memory (0: about 256 MiB); whole blocks, at least one.

    With soft labels as many of the target's lie beside them.

    hidden [M*(B-1), H] (any leading shape), slots 1..B-1 of each block; head_weight [V, H], frozen: it gets no
    gradient; labels int64 and valid bool, M*(B-1) elements in any shape. Products are in the head's dtype, whatever
    autocast says (the target's in ``soft.head``'s own); softmax, weights and sums in float32. No valid slot: zero loss,
    weight and gradient, all finite. No host sync. Thread-safe.
    """
    slots = block_size - 1
    labels, valid = labels.reshape(-1, slots), valid.reshape(-1, slots)
    flat = hidden.reshape(-1, hidden.shape[-1])
    differentiate = torch.is_grad_enabled() and flat.requires_grad
    blocks = blocks_per_chunk(chunk, block_size, head_weight)
    with torch.autocast(hidden.device.type, enabled=False):
        loss_sum, weight_sum, nll, argmax, hard_sum = _FrozenHeadLoss.apply(
            flat, head_weight.detach(), labels, valid, soft, (weighting, gamma, alpha), blocks, differentiate
        )
    return LossParts(loss_sum=loss_sum, weight_sum=weight_sum, nll=nll, argmax=argmax, hard_sum=hard_sum)
