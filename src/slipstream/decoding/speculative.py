"""Block decoding: draft a block, verify it in one target pass, keep the accepted prefix and one token more, roll back.

::

    prefill the prompts -> first token (the anchor), context features of the prompt
    repeat: block  = [anchor, drafts 1..B-1]                      drafts are greedy, in one pass of the drafter
            tokens = the target's own choice after each slot      argmax, or a sample at temperature T
            a      = leading drafts that equal the choice before  0..B-1
            commit tokens[0..a]: a accepted drafts and the bonus; tokens[a] is the next anchor
            features of the anchor and the a drafts enter the context; the new anchor's does not exist yet

Every committed token is the target's own choice given its true prefix, so greedy output equals plain greedy output and
sampled output has the target's distribution. Source: arXiv 2602.06036, section on inference.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

from slipstream.decoding.plain import (
    Clock,
    decode_batches,
    decode_plain,
    draw_noise,
    generate_plain,
)
from slipstream.decoding.prefill import DecoderCall, prefill
from slipstream.decoding.proposer import DrafterProposer, Proposer, resolve_block_size
from slipstream.decoding.responses import Decoded, Progress, Response, SpeculativeGeneration, check_finite, kept_rows
from slipstream.decoding.rollback import TargetState
from slipstream.decoding.sampling import check_temperature, choose
from slipstream.records import Generation
from slipstream.target.features import tap_layers

if TYPE_CHECKING:
    from slipstream.drafter.config import DrafterConfig
    from slipstream.drafter.model import DraftModel
    from slipstream.target.model import Target

__all__ = [
    "Decoded",
    "SpeculativeGeneration",
    "decode_plain",
    "decode_speculative",
    "generate_plain",
    "generate_speculative",
]


def generate_speculative(
    target: Target,
    draft_model: DraftModel,
    config: DrafterConfig,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    batch_size: int = 8,
    progress: Progress | None = None,
    block_size: int | None = None,
    first_index: int = 0,
) -> tuple[list[Generation], float]:
    """Decode with the target and its drafter. Call from the target's thread; both models on one device.

    Args:
        target, prompts, max_new_tokens, temperature, seed, batch_size, progress, first_index: as in ``generate_plain``.
        draft_model: the drafter, any float dtype; features are cast to it.
        config: the drafter's own.
        block_size: anchor and masks of a block; None is the trained size, a shorter one is allowed.

    Returns:
        the generations (``SpeculativeGeneration``) in the order of the prompts, and wall seconds.

    Raises:
        DecodingError: as ``generate_plain``, a block size outside 2..trained, or a target that cannot be rolled back.
        DrafterError: hidden size, vocabulary, layers or mask token are another target's.
    """
    decoded = decode_speculative(
        target,
        DrafterProposer(target, draft_model, config),
        prompts,
        block_size=resolve_block_size(config, block_size),
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        batch_size=batch_size,
        progress=progress,
        first_index=first_index,
    )
    return decoded.generations, decoded.seconds


@torch.inference_mode()
def decode_speculative(
    target: Target,
    proposer: Proposer,
    prompts: Sequence[Sequence[int]],
    *,
    block_size: int,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    batch_size: int = 8,
    progress: Progress | None = None,
    first_index: int = 0,
) -> Decoded:
    """As ``generate_speculative``, for any source of drafts, with the cost split into prefill and rounds."""
    check_temperature(temperature)
    return decode_batches(
        target,
        prompts,
        lambda call, rows, clock: _decode_batch(
            call, proposer, rows, block_size, max_new_tokens, temperature, seed, clock
        ),
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        progress=progress,
        first_index=first_index,
        network=getattr(proposer, "network", None),
    )


def _decode_batch(
    call: DecoderCall,
    proposer: Proposer,
    rows: list[Response],
    block_size: int,
    limit: int,
    temperature: float,
    seed: int,
    clock: Clock,
) -> list[Response]:
    """Decode one batch to its end. One host sync a round: what was accepted.

    A row that has ended keeps nothing of a block; where it may stay in the batch (``kept_rows``), it is not looked at.
    """
    target, device = call.target, call.target.device
    done: list[Response] = []
    started = clock.now()
    first = prefill(call, [r.prompt for r in rows], proposer.layer_ids)
    # A pass may reach block_size - 1 tokens past a row's limit; what it writes there is never kept.
    capacity = max(first.lengths) + limit + block_size
    noise = draw_noise(rows, seed, limit + block_size, temperature, device)
    tokens, finite = choose(first.logits, temperature, None if noise is None else noise[:, 0])
    state = TargetState(call, first, capacity)
    proposer.start([r.index for r in rows], first.lengths, first.features, capacity)
    anchors = tokens
    committed = [[token] for token in tokens.tolist()]
    for row, ok in zip(rows, finite.tolist(), strict=True):
        check_finite(row, ok, 0)
    del first
    clock.prefilled(started)
    counted = False
    with state:
        while True:
            counts = []
            for row, new in zip(rows, committed, strict=True):
                goes_on = row.finish is None and not row.take(new, counted=counted)
                if new and not goes_on:
                    done.append(row)
                counts.append(len(new) if goes_on else 0)
            if counted:
                state.commit(counts)
            if not any(counts):
                return done
            keep = kept_rows([count > 0 for count in counts], device)
            if keep is not None:
                rows = [rows[i] for i in keep]
                index = torch.tensor(keep, device=device)
                anchors = anchors[index]
                noise = None if noise is None else noise[index]
                state.keep(keep)
                proposer.keep(keep)
            drafts = proposer.propose(anchors, state.starts, block_size - 1)
            block = torch.cat([anchors[:, None], drafts], dim=1)
            with tap_layers(target, proposer.layer_ids) if proposer.layer_ids else nullcontext() as taps:
                hidden = state.verify(block)
            slots = None
            if noise is not None:
                at = torch.tensor([len(r.output) for r in rows], device=device)[:, None]
                slots = noise.gather(1, at + torch.arange(block_size, device=device))
            choices, finite = choose(target.head(hidden), temperature, slots)
            accepted = (choices[:, :-1] == drafts).long().cumprod(dim=1).sum(dim=1)
            anchors = choices.gather(1, accepted[:, None]).squeeze(1)
            if taps is not None:
                proposer.observe(taps.features(), state.starts)
            clock.round(sum(row.finish is None for row in rows))
            counted = True
            committed = []
            fetched = torch.cat([accepted[:, None], finite.all(dim=1, keepdim=True).long(), choices], dim=1).tolist()
            for row, (count, ok, *chosen) in zip(rows, fetched, strict=True):
                if row.finish is not None:  # it has ended, and is still in the batch
                    committed.append([])
                    continue
                check_finite(row, bool(ok), len(row.output))
                committed.append(chosen[: count + 1])
