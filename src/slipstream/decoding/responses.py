"""Prompts that are checked and cut into batches, responses that grow until eos or the token limit, and who goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from slipstream.errors import DecodingError
from slipstream.records import Generation

if TYPE_CHECKING:
    import torch

    from slipstream.target.model import TargetInfo

Progress = Callable[[int, int], None]
"""Called with (finished responses, all responses) whenever a response ends."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeculativeGeneration(Generation):
    """A response of block decoding.

    ``cut`` tells that the last pass had accepted more than the response could take: eos stood inside the accepted
    block, or the token limit did. ``accept_lengths`` holds what was kept, so ``1 + sum(accept_lengths) ==
    len(output_ids)``.
    """

    cut: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoded:
    """All responses of one decoding run, in the order of the prompts, and what it cost.

    seconds: wall time, prefill included; prefill_seconds: its share; rounds: target passes after the prefills;
    row_rounds: the same, counted once for each row that took part.
    """

    generations: list[Generation]
    seconds: float
    prefill_seconds: float
    rounds: int
    row_rounds: int


@dataclass(slots=True)
class Response:
    """One response while it grows."""

    index: int
    prompt: tuple[int, ...]
    limit: int
    eos_ids: frozenset[int]
    output: list[int] = field(default_factory=list)
    accept_lengths: list[int] = field(default_factory=list)
    finish: Literal["eos", "length"] | None = None
    cut: bool = False

    def take(self, tokens: Sequence[int], *, counted: bool) -> bool:
        """Append the committed ``tokens`` of one pass up to eos or the limit; return True when the response is
        finished.

        ``counted``: the pass is a verify pass and enters the acceptance statistics (the prefill's own token does not).
        """
        kept = 0
        for token in tokens:
            self.output.append(token)
            kept += 1
            if token in self.eos_ids:
                self.finish = "eos"
                break
            if len(self.output) == self.limit:
                self.finish = "length"
                break
        if counted:
            self.accept_lengths.append(kept)
            self.cut = kept < len(tokens)
        return self.finish is not None

    def as_generation(self) -> SpeculativeGeneration:
        """Return the finished record."""
        return SpeculativeGeneration(
            prompt_ids=self.prompt,
            output_ids=tuple(self.output),
            accept_lengths=tuple(self.accept_lengths),
            finish=self.finish or "length",
            cut=self.cut,
        )


def check_prompts(prompts: Sequence[Sequence[int]], info: TargetInfo, *, max_new_tokens: int, batch_size: int) -> None:
    """Refuse prompts and sizes that cannot be decoded. Raises DecodingError naming prompt, value and cure."""
    if not prompts:
        raise DecodingError("there is no prompt to decode; give at least one")
    if max_new_tokens < 1:
        raise DecodingError(f"max_new_tokens is {max_new_tokens}; it must be at least 1")
    if batch_size < 1:
        raise DecodingError(f"batch_size is {batch_size}; it must be at least 1")
    for number, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise DecodingError(f"prompt {number} is empty; a target needs at least one token to start from")
        low, high = min(prompt), max(prompt)
        if low < 0 or high >= info.vocab_rows:
            bad = low if low < 0 else high
            raise DecodingError(
                f"prompt {number} holds token {bad}, but the target embeds 0..{info.vocab_rows - 1}; "
                "tokenise it with the target's own tokenizer"
            )
        if info.max_positions and len(prompt) + max_new_tokens > info.max_positions:
            room = info.max_positions - len(prompt)
            raise DecodingError(
                f"prompt {number} has {len(prompt)} tokens and max_new_tokens is {max_new_tokens}, but the target has "
                f"{info.max_positions} positions; shorten the prompt"
                + (f" or lower max_new_tokens to {room}" if room > 0 else "")
            )


def batches(
    prompts: Sequence[Sequence[int]],
    *,
    batch_size: int,
    max_new_tokens: int,
    eos_ids: Sequence[int],
    first_index: int = 0,
) -> Iterator[list[Response]]:
    """Yield batches of fresh responses, longest prompts first, so that a batch holds prompts of like length.

    Longest first, so that a run that would not fit in memory fails at once. A response's ``index`` is its prompt's
    place in ``prompts`` plus ``first_index``; it seeds the sampling.
    """
    order = sorted(range(len(prompts)), key=lambda i: (-len(prompts[i]), i))
    stops = frozenset(eos_ids)
    for at in range(0, len(order), batch_size):
        yield [
            Response(
                index=first_index + i, prompt=tuple(int(t) for t in prompts[i]), limit=max_new_tokens, eos_ids=stops
            )
            for i in order[at : at + batch_size]
        ]


def kept_rows(live: Sequence[bool], device: torch.device) -> list[int] | None:
    """Return which rows of a batch go on, in their order, or None for all, given which have not ended (some have not).

    On a CPU, where each row costs, they are the live ones. On a GPU dropping rows copies all states, and each number of
    rows that is new has its price (kernels are made for it): a batch shrinks to 1, 2, 3, 4, 6, 8, 12, 16, ... rows
    only, and rows that have ended fill it up.
    """
    count = sum(live)
    size = count if device.type == "cpu" else _size_for(count)
    if size >= len(live):
        return None
    kept, spare = [], size - count
    for row, goes_on in enumerate(live):
        if goes_on or spare > 0:
            kept.append(row)
            spare -= not goes_on
    return kept


def _size_for(count: int) -> int:
    """Return the smallest power of two, or one and a half of one, that is at least ``count``."""
    power = 1 << (count - 1).bit_length()
    return power * 3 // 4 if power >= 4 and power * 3 // 4 >= count else power


def check_finite(response: Response, finite: bool, length: int) -> None:
    """Raise DecodingError when the target's logits for ``response`` after ``length`` tokens were not finite."""
    if not finite:
        raise DecodingError(
            f"the target's logits are not finite for prompt {response.index} after {length} tokens; "
            "load the target in bfloat16 or float32"
        )
