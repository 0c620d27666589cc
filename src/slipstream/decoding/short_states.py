"""Gated DeltaNets that run a pass by ``short_block`` instead of their own forward, once that has proven itself.

``ShortBlocks`` holds the layers' weights and the verdict, ``ShortPass`` the passes over one batch. The proof is the
first pass of each length: the modules run as they are, and beside each its short block on the same input. Their
outputs, and the states after the whole block, must agree. Where they do not, the modules' own forward stays, and that
is said.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from slipstream.decoding.short_block import Pieces, ShortBlock, advance_blocks, suits_short_block

TOLERANCE = 1e-3
"""Relative. A wrong formula is off by about 1; the order of sums stays far below."""


class ShortBlocks:
    """The short blocks of a target's ``layers``, by number.

    ``proven``: the lengths of passes that have proven themselves; ``refused``: "" or why none is used any more.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        self.blocks: dict[int, ShortBlock] = {}
        self.proven: set[int] = set()
        self.refused = ""
        for number, layer in enumerate(layers):
            modules = [m for m in layer.children() if suits_short_block(m) and "forward" not in m.__dict__]
            if len(modules) == 1:
                self.blocks[number] = ShortBlock(modules[0])

    def cover(self, cache: Any, numbers: Sequence[int]) -> bool:
        """Return whether they are all of the recurrent layers ``numbers`` of ``cache``, and may be used or tried."""
        if self.refused or not numbers or set(numbers) != set(self.blocks):
            return False
        layers = [cache.layers[n] for n in numbers]
        if not all(layer.conv_states.keys() == layer.recurrent_states.keys() == {0} for layer in layers):
            return False
        states = [state for layer in layers for state in (layer.conv_states[0], layer.recurrent_states[0])]
        return all(isinstance(s, Tensor) and s.dtype == torch.float32 and s.is_contiguous() for s in states)

    def judge(self, length: int, differences: Sequence[Tensor]) -> None:
        """Take the relative differences, each 0-d, of a proof over ``length`` tokens; say it if they are too large."""
        largest = float(torch.stack(list(differences)).max())
        if largest <= TOLERANCE:
            self.proven.add(length)
        else:
            self.refuse(f"short blocks differ from it by {largest:.2g}")

    def refuse(self, reason: str) -> None:
        """Never use them, and say why."""
        self.refused = reason
        print(f"recurrent layers run by their own forward, which is slower: {reason}", file=sys.stderr)


class ShortPass:
    """Runs the recurrent layers of one batch's ``cache``. ``begin``, a pass of the target, ``commit``, and so on."""

    def __init__(self, shared: ShortBlocks, cache: Any) -> None:
        self.shared, self._cache = shared, cache
        self._running = False
        self._length = 0
        self._pieces: dict[int, Pieces] = {}
        self._before: dict[int, tuple[Tensor, Tensor]] = {}
        self._differences: list[Tensor] = []

    @property
    def proven(self) -> bool:
        """Whether the pass is run by short blocks; before its length is proven, and where it is refused, it is not."""
        return self._length in self.shared.proven and not self.shared.refused

    def install(self) -> None:
        """Put the short blocks in the modules' place."""
        for number, block in self.shared.blocks.items():
            block.module.forward = self._forward(number, block, block.module.forward)

    def remove(self) -> None:
        """Give the modules their own forward back."""
        for block in self.shared.blocks.values():
            block.module.__dict__.pop("forward", None)

    def begin(self, length: int) -> None:
        """The next forwards with this batch's cache are a pass over ``length`` tokens."""
        self._running, self._length = not self.shared.refused, length
        self._pieces = {}

    def _states(self, number: int) -> tuple[Tensor, Tensor]:
        layer = self._cache.layers[number]
        return layer.conv_states[0], layer.recurrent_states[0]

    def _forward(self, number: int, block: ShortBlock, genuine: Any) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            given = (*args, *kwargs.values())
            if not self._running or not any(value is self._cache for value in given):
                return genuine(*args, **kwargs)
            hidden = args[0] if args else kwargs["hidden_states"]
            conv, state = self._states(number)
            output, self._pieces[number] = block.forward(hidden, conv, state)
            if self.proven:
                return output
            self._before[number] = conv.clone(), state.clone()
            true = genuine(*args, **kwargs)
            self._differences.append(difference(output, true))
            return true

        return forward

    def commit(self, counts: Sequence[int]) -> bool:
        """Keep the first ``counts[r]`` tokens of the pass in row r; return False where the modules themselves ran it.

        Then their states are those after the whole block. A proof ends here: if it holds, the states are set to those
        after the kept tokens all the same.
        """
        tried, self._running = self._running, False
        if tried and not self.proven:
            self._prove(len(counts))
        if not self.proven:
            return False
        if not any(counts):  # every row is dropped next
            return True
        numbers = list(self.shared.blocks)
        conv = advance_blocks([self._pieces[n] for n in numbers], [self._states(n)[1] for n in numbers], counts)
        for number, tail in zip(numbers, conv, strict=True):
            self._cache.layers[number].conv_states[0] = tail
        self._pieces = {}
        return True

    def _prove(self, rows: int) -> None:
        """Judge a first pass; where it holds, put back the states from before it."""
        numbers, before = list(self.shared.blocks), self._before
        self._before = {}
        if self._pieces.keys() != set(numbers):
            self.shared.refuse("not every one of them is called with the cache")
            return
        states = [before[n][1].clone() for n in numbers]
        conv = advance_blocks([self._pieces[n] for n in numbers], states, [self._length] * rows)
        for number, mine, state in zip(numbers, conv, states, strict=True):
            its_conv, its_state = self._states(number)
            self._differences += [difference(mine, its_conv), difference(state, its_state)]
        self.shared.judge(self._length, self._differences)
        self._differences = []
        if self.proven:
            for number in numbers:
                layer = self._cache.layers[number]
                layer.conv_states[0], layer.recurrent_states[0] = before[number]


def difference(mine: Tensor, its: Tensor) -> Tensor:
    """Return the relative difference of two tensors, 0-d; NaN where either is not finite, which no tolerance passes."""
    mine, its = mine.float(), its.float()
    apart: Tensor = (mine - its).norm() / its.norm().clamp_min(1e-12)
    return apart
