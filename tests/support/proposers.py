"""Drafters for tests that need no training: an oracle that knows the answers, right as far as it is told to be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


class Oracle:
    """Proposes the true continuation for ``right(prompt index, pass number)`` tokens of a block, then wrong ones.

    ``answers`` hold, for each prompt, at least block size tokens more than will be decoded.
    """

    layer_ids: tuple[int, ...] | None = None

    def __init__(
        self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], right: Callable[[int, int], int]
    ) -> None:
        self.prompts, self.answers, self.right = prompts, answers, right
        self.indices: list[int] = []
        self.passes: dict[int, int] = {}

    def start(self, indices: Sequence[int], lengths: Sequence[int], features: Any, capacity: int) -> None:
        self.indices = list(indices)
        assert [len(self.prompts[i]) for i in indices] == list(lengths)

    def propose(self, anchors: torch.Tensor, starts: Sequence[int], drafts: int) -> torch.Tensor:
        rows = []
        for anchor, start, index in zip(anchors.tolist(), starts, self.indices, strict=True):
            at = start - len(self.prompts[index])
            assert self.answers[index][at] == anchor, "the anchor is not the answer's token at its position"
            number = self.passes.get(index, 0)
            self.passes[index] = number + 1
            true = list(self.answers[index][at + 1 : at + 1 + drafts])
            known = min(self.right(index, number), drafts)
            rows.append([t if k < known else (t + 1) % 250 for k, t in enumerate(true)])
        return torch.tensor(rows, device=anchors.device)

    def observe(self, features: Any, starts: Sequence[int]) -> None:
        """Nothing to learn."""

    def keep(self, rows: Sequence[int]) -> None:
        self.indices = [self.indices[i] for i in rows]


class Follower:
    """Proposes by a fixed function of the last token, chained: a table drafter that runs in the real decoder."""

    layer_ids: tuple[int, ...] | None = None

    def __init__(self, follow: Callable[[int], int]) -> None:
        self.follow = follow

    def start(self, indices: Sequence[int], lengths: Sequence[int], features: Any, capacity: int) -> None:
        """Nothing to prepare."""

    def propose(self, anchors: torch.Tensor, starts: Sequence[int], drafts: int) -> torch.Tensor:
        rows = []
        for token in anchors.tolist():
            row: list[int] = []
            for _ in range(drafts):
                token = self.follow(token)
                row.append(token)
            rows.append(row)
        return torch.tensor(rows, device=anchors.device)

    def observe(self, features: Any, starts: Sequence[int]) -> None:
        """Nothing to learn."""

    def keep(self, rows: Sequence[int]) -> None:
        """Nothing is kept."""
