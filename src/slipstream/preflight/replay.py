"""Block decoding with drafts that are known to be right: what a perfect drafter would get from this target."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.decoding.losslessness import compare_lossless
from slipstream.decoding.plain import generate_plain
from slipstream.decoding.speculative import decode_speculative
from slipstream.preflight.report import CheckFailure
from slipstream.records import Generation
from slipstream.target.model import Target


class ReplayProposer:
    """Drafts one known response, row 0 of a batch of one; beyond its end it drafts token 0. See ``Proposer``."""

    layer_ids: tuple[int, ...] | None = None

    def __init__(self, known: Generation) -> None:
        self._ids = [*known.prompt_ids, *known.output_ids]

    def start(self, indices: Sequence[int], lengths: Sequence[int], features: Tensor | None, capacity: int) -> None:
        """Nothing to prepare."""

    def propose(self, anchors: Tensor, starts: Sequence[int], drafts: int) -> Tensor:
        """Return what followed the anchor's position in the known response."""
        after = self._ids[starts[0] + 1 : starts[0] + 1 + drafts]
        return torch.tensor([[*after, *([0] * (drafts - len(after)))]], device=anchors.device)

    def observe(self, features: Tensor | None, starts: Sequence[int]) -> None:
        """Nothing to learn."""

    def keep(self, rows: Sequence[int]) -> None:
        """There is one row."""


def reproducible_answers(
    target: Target, prompts: Sequence[Sequence[int]], *, block_size: int, max_new_tokens: int
) -> list[Generation]:
    """Return the target's greedy answers, each as far as block decoding with perfect drafts writes it too.

    In float32 that is all of it. In a lower dtype the two part where the target's best tokens nearly tie; what follows
    cannot be decoded block-wise by any drafter and proves nothing about one. A cut answer ends with a whole block.
    Raises CheckFailure where they part otherwise than at a near tie.
    """
    answers, _ = generate_plain(target, prompts, max_new_tokens=max_new_tokens, batch_size=len(prompts))
    found = []
    for answer in answers:
        replayed = decode_speculative(
            target,
            ReplayProposer(answer),
            [answer.prompt_ids],
            block_size=block_size,
            max_new_tokens=len(answer.output_ids),
        ).generations[0]
        result = compare_lossless([answer], [replayed], target=target, batch_size=len(prompts))
        for difference in result.faults:
            raise CheckFailure(
                f"with the target's own answer as drafts, block decoding writes {difference['speculative']} at token "
                f"{difference['position']} where plain decoding writes {difference['plain']}, logits "
                f"{difference.get('logit_gap', float('nan')):.3g} apart in {target.info.dtype}: acceptance or the "
                "rollback of the target's state is wrong"
            )
        output = answer.output_ids
        if result.first_differences:
            same = int(result.first_differences[0]["position"])
            output = output[: 1 + (same - 1) // block_size * block_size] if same else ()
        found.append(Generation(prompt_ids=answer.prompt_ids, output_ids=output))
    return found
