"""The block size of an evaluation: the trained one, the one asked for, or the fastest of several that are tried."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slipstream.errors import ConfigError

if TYPE_CHECKING:
    from slipstream.config import EvaluationConfig

_LEAST, _MOST = 8, 32  # prompts of a trial, where the batch size asks for no more
_KEPT = 2  # an evaluation gives a trial some of its own prompts if it keeps so many times as many


@dataclass(frozen=True, kw_only=True)
class Split:
    """Prompts of the evaluation and of the trial before it; ``separate`` where no prompt is in both."""

    measured: list[list[int]]
    tried: list[list[int]]
    separate: bool


def check_block_sizes(settings: EvaluationConfig, trained: int | None = None) -> None:
    """Refuse block sizes that cannot be decoded with. Raises ConfigError naming setting, value and cure.

    ``trained``: the drafter's, where it is known already.
    """
    named = [("evaluation.compare_block_sizes holds", size) for size in settings.compare_block_sizes]
    if settings.block_size != 0:
        named.append(("evaluation.block_size is", settings.block_size))
    for what, size in named:
        if size < 2:
            raise ConfigError(f"{what} {size}; a block is an anchor and at least one draft: use 2 or more")
        if trained is not None and size > trained:
            raise ConfigError(f"{what} {size}, but the drafter was trained with {trained}; use 2 to {trained}")
    sizes = settings.compare_block_sizes
    twice = next((size for size in sizes if sizes.count(size) > 1), None)
    if twice is not None:
        raise ConfigError(f"evaluation.compare_block_sizes holds {twice} twice; name each size once")
    if sizes and settings.block_size != 0:
        raise ConfigError(
            f"evaluation.block_size is {settings.block_size}, but evaluation.compare_block_sizes is to choose one; "
            "set one of them"
        )


def trial_size(settings: EvaluationConfig) -> int:
    """Return how many prompts a trial takes: two batches, 8 to 32, but always one whole batch; 0 without a trial."""
    if not settings.compare_block_sizes:
        return 0
    return max(settings.batch_size, _LEAST, min(2 * settings.batch_size, _MOST))


def prompts_to_read(settings: EvaluationConfig) -> int:
    """Return how many held-out prompts are read; 0 is all."""
    return settings.max_prompts + trial_size(settings) if settings.max_prompts > 0 else 0


def split_prompts(prompts: Sequence[list[int]], settings: EvaluationConfig) -> Split:
    """Divide the prompts that were read.

    The trial takes the last ones: those behind ``max_prompts``, a batch of them at least, or some that the evaluation
    then goes without, if it keeps twice as many. Otherwise it takes the evaluation's first prompts: those are in both.
    """
    every, taken = list(prompts), trial_size(settings)
    wanted = min(settings.max_prompts or len(every), len(every))
    spare = len(every) - wanted
    if taken and spare >= max(settings.batch_size, _LEAST):
        taken = min(taken, spare)
    kept = min(wanted, len(every) - taken)
    if taken and kept >= min(wanted, _KEPT * taken):
        return Split(measured=every[:kept], tried=every[len(every) - taken :], separate=True)
    return Split(measured=every[:wanted], tried=every[: min(taken, wanted)], separate=False)
