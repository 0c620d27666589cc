"""Which block size decodes fastest here, measured: acceptance tells it for no machine.

A longer block is accepted further and costs more, and how much more depends on machine, target, batch and load. So
plain decoding and each block size decode the same prompts, batch by batch. Every batch is decoded several times, and
the sizes take turns, each time in another order, so that a slow minute of the machine meets all of them; of a batch's
times the shortest counts, because other work can only lengthen one. The first time is the warm-up of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from slipstream.decoding.acceptance import summarise
from slipstream.decoding.equipment import equipped
from slipstream.decoding.plain import decode_plain
from slipstream.decoding.proposer import DrafterProposer, resolve_block_size
from slipstream.decoding.speculative import decode_speculative

if TYPE_CHECKING:
    from slipstream.config import EvaluationConfig
    from slipstream.decoding.responses import Decoded
    from slipstream.drafter.config import DrafterConfig
    from slipstream.drafter.model import DraftModel
    from slipstream.target.model import Target

REPEATS = 3
MOST_TOKENS = 64
"""Longest response of a trial: enough passes to tell, at a fraction of an evaluation's cost."""

PLAIN = 0
"""Stands for plain decoding where block sizes are keys."""


@dataclass(frozen=True, kw_only=True)
class TriedBlock:
    """A block size: its tau, tokens per second by the shortest times, and the ratio to plain decoding's.

    ``spread``: how much longer its slowest repeat after the first took than the shortest times together, relative.
    """

    block_size: int
    tau: float
    tokens_per_second: float
    ratio: float
    spread: float


@dataclass(frozen=True, kw_only=True)
class BlockComparison:
    """What was tried, in the order asked for, and the fastest.

    separate: whether the prompts are others than those of the evaluation that follows.
    """

    chosen: int
    tried: tuple[TriedBlock, ...]
    plain_tokens_per_second: float
    plain_spread: float
    prompts: int
    separate: bool
    max_new_tokens: int
    batch_size: int
    repeats: int

    def as_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)


def compare_block_sizes(
    target: Target,
    draft_model: DraftModel,
    config: DrafterConfig,
    prompts: Sequence[Sequence[int]],
    sizes: Sequence[int],
    settings: EvaluationConfig,
    *,
    separate: bool,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> BlockComparison:
    """Decode ``prompts`` plainly and with each of ``sizes``, and say which is fastest. Call from the target's thread.

    Batch size, temperature and the limit of a response (at most ``MOST_TOKENS``) are ``settings``'. ``progress`` is
    called with (finished, all) runs. Raises DecodingError and DrafterError as ``generate_speculative``.
    """
    for size in sizes:
        resolve_block_size(config, size)
    proposer = DrafterProposer(target, draft_model, config, whole_block=settings.draft_whole_block)
    limit = min(settings.max_new_tokens, MOST_TOKENS)
    options: dict[str, Any] = {
        "max_new_tokens": limit,
        "temperature": settings.temperature,
        "seed": seed,
        "batch_size": settings.batch_size,
    }
    # As decoding cuts them into batches: by length, so that rows of a batch are alike.
    ordered = sorted(prompts, key=lambda p: -len(p))
    batches = [ordered[at : at + settings.batch_size] for at in range(0, len(ordered), settings.batch_size)]
    runs = [PLAIN, *sizes]
    decoded: dict[int, list[list[Decoded]]] = {size: [[] for _ in batches] for size in runs}
    done, total = 0, REPEATS * len(batches) * len(runs)
    with equipped(target, draft_model):
        for repeat in range(REPEATS):
            for number, batch in enumerate(batches):
                first = number * settings.batch_size
                for size in _rotated(runs, repeat + number):
                    if size == PLAIN:
                        run = decode_plain(target, batch, first_index=first, **options)
                    else:
                        run = decode_speculative(target, proposer, batch, block_size=size, first_index=first, **options)
                    decoded[size][number].append(run)
                    done += 1
                    if progress is not None:
                        progress(done, total)
    plain, plain_spread = _speed(decoded[PLAIN])
    tried = []
    for size in sizes:
        speed, spread = _speed(decoded[size])
        accepted = summarise([g for batch in decoded[size] for g in batch[0].generations], size)
        tried.append(
            TriedBlock(block_size=size, tau=accepted.tau, tokens_per_second=speed, ratio=speed / plain, spread=spread)
        )
    return BlockComparison(
        chosen=max(tried, key=lambda t: t.tokens_per_second).block_size,
        tried=tuple(tried),
        plain_tokens_per_second=plain,
        plain_spread=plain_spread,
        prompts=len(prompts),
        separate=separate,
        max_new_tokens=limit,
        batch_size=settings.batch_size,
        repeats=REPEATS,
    )


def _rotated(runs: Sequence[int], by: int) -> list[int]:
    """Return the runs in an order that begins ``by`` places later."""
    at = by % len(runs)
    return [*runs[at:], *runs[:at]]


def _speed(batches: Sequence[Sequence[Decoded]]) -> tuple[float, float]:
    """Return tokens per second by the shortest time of each batch, and how much longer the slowest repeat took."""
    tokens = sum(len(g.output_ids) for batch in batches for g in batch[0].generations)
    shortest = sum(min(run.seconds for run in batch) for batch in batches)
    slowest = max(sum(run.seconds for run in repeat) for repeat in list(zip(*batches, strict=True))[1:])
    return tokens / shortest, slowest / shortest - 1
