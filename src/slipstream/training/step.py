"""One micro-batch: context features and blocks in, loss sums and counts out. Pure: no I/O and no host sync."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from slipstream.config import TrainingConfig, default_gamma
from slipstream.drafter.anchors import label_sources
from slipstream.drafter.loss import SoftLabels, chunk_rows, chunked_loss
from slipstream.errors import TrainingError
from slipstream.records import FeatureBatch, StepResult

if TYPE_CHECKING:
    from slipstream.drafter.anchors import Blocks
    from slipstream.drafter.attention import Attention
    from slipstream.drafter.model import DraftModel


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSettings:
    """The resolved choices of a step. ``precision``: compute dtype of the drafter; ``chunk``: logit rows at once.

    soft_share: of the target's distribution in a label; 0: labels are the data's tokens.
    """

    block_size: int
    loss: Literal["decay", "dpace"]
    gamma: float
    dpace_alpha: float
    chunk: int
    precision: torch.dtype
    soft_share: float = 0.0


def resolve_step_settings(
    training: TrainingConfig, *, block_size: int, vocab_rows: int, precision: torch.dtype
) -> StepSettings:
    """Fill in gamma and the head's chunk: whole blocks, with float32 logits of about 256 MiB."""
    slots = block_size - 1
    rows = training.head_chunk or chunk_rows(vocab_rows)
    return StepSettings(
        block_size=block_size,
        loss=training.loss,
        gamma=training.gamma or default_gamma(block_size),
        dpace_alpha=training.dpace_alpha,
        chunk=max(rows // slots, 1) * slots,
        precision=precision,
        soft_share=training.soft_share if training.labels == "soft" else 0.0,
    )


def anchor_generator(seed: int, index: int, draw: int) -> torch.Generator:
    """Return the CPU generator of one draw of anchors: a function of seed, micro-batch index and draw, so that nothing
    has to be saved for a resume."""
    digest = hashlib.sha256(f"anchors/{seed}/{index}/{draw}".encode()).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def training_step(
    draft_model: DraftModel,
    embed: Callable[[Tensor], Tensor],
    head_weight: Tensor,
    features: FeatureBatch,
    blocks: Blocks,
    attention: Attention,
    *,
    settings: StepSettings,
    head: Callable[[Tensor], Tensor] | None = None,
) -> StepResult:
    """Run the drafter on one draw of anchors and return sums; ``loss_sum`` carries the gradient.

    ``features`` [R, S, K*H] and ``blocks`` lie on the drafter's device; ``embed`` is the target's own embedding and
    ``head_weight`` [V, H] its head, both frozen. ``attention`` must have been updated with these blocks' anchors.
    Soft labels need the target's ``head`` as it computes logits, and final states in ``features``; raises TrainingError
    where one is missing.
    """
    rows, anchors, block = blocks.noise_ids.shape
    with torch.no_grad():
        noise = embed(blocks.noise_ids).reshape(rows, anchors * block, -1)
    context = features.features
    # Otherwise autocast sees to the matmuls' dtype; but a float16 residual would overflow, and has no loss scaling.
    if settings.precision == torch.float32 or noise.dtype == torch.float16:
        context, noise = context.float(), noise.float()
    positions = blocks.positions.reshape(rows, anchors * block)
    with torch.autocast(noise.device.type, dtype=torch.bfloat16, enabled=settings.precision == torch.bfloat16):
        hidden = draft_model(context, noise, features.batch.positions, positions, attention)
    # Slot 0 is the anchor: known, never supervised.
    hidden = hidden.reshape(rows * anchors, block, -1)[:, 1:].reshape(rows * anchors * (block - 1), -1)
    labels = blocks.labels.reshape(rows * anchors, block - 1)
    valid = blocks.valid.reshape(rows * anchors, block - 1)
    loss = chunked_loss(
        hidden,
        head_weight,
        labels,
        valid,
        block_size=settings.block_size,
        weighting=settings.loss,
        gamma=settings.gamma,
        alpha=settings.dpace_alpha,
        soft=soft_labels(features, blocks, head, settings.soft_share) if settings.soft_share else None,
        chunk=settings.chunk,
    )
    correct = (loss.argmax.reshape(valid.shape) == labels) & valid
    leading = correct.long().cumprod(dim=1)
    counted = blocks.keep
    if blocks.length is not None:
        # A short block accepts less however good it is: acceptance is that of the whole ones.
        counted = counted & (blocks.length == block)
        leading = leading * counted.reshape(-1, 1)
    return StepResult(
        loss_sum=loss.loss_sum,
        weight_sum=loss.weight_sum,
        blocks=counted.sum(),
        accepted=leading.sum(),
        correct_by_slot=correct.sum(dim=0),
        valid_by_slot=valid.sum(dim=0),
        hard_sum=loss.hard_sum,
    )


def soft_labels(
    features: FeatureBatch, blocks: Blocks, head: Callable[[Tensor], Tensor] | None, share: float
) -> SoftLabels:
    """Return where each slot's label comes from: the target's state one token before it, and the target's head.

    Raises TrainingError where one of them is missing.
    """
    states = features.final_states
    if states is None or head is None:
        raise TrainingError("soft labels need the target's final states and its head; read features with final_states")
    source = label_sources(blocks, states.shape[1])
    return SoftLabels(states=states.flatten(0, 1), source=source, head=head, share=share)
