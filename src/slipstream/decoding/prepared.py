"""What decoding makes of a target and a drafter before the clock starts: once for all runs inside one context."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from torch import nn

from slipstream.decoding.packed import packed_linears
from slipstream.decoding.short_states import ShortBlocks

if TYPE_CHECKING:
    from slipstream.target.model import Target


@dataclass(frozen=True, slots=True)
class Prepared:
    """The short blocks of a target's recurrent layers, and "" or why its linear layers are as they were."""

    short_blocks: ShortBlocks
    linears: str


_PREPARED: WeakKeyDictionary[nn.Module, Prepared] = WeakKeyDictionary()


@contextlib.contextmanager
def prepared(target: Target, network: nn.Module | None = None) -> Iterator[Prepared]:
    """Prepare ``target`` and ``network`` (a drafter) for decoding while entered. Weights must not change inside.

    On a CPU their linear layers are laid out for few rows and recurrent layers get short blocks; a GPU needs neither.
    Entered again for the same target, only a network that is new is prepared. Thread-safe as the target is.
    """
    found = _PREPARED.get(target.model)
    if found is not None:
        with packed_linears(network):
            yield found
        return
    with packed_linears(target.model, network) as reason:
        made = _PREPARED[target.model] = Prepared(ShortBlocks(list(target.parts.layers)), reason)
        try:
            yield made
        finally:
            del _PREPARED[target.model]


def short_blocks(target: Target) -> ShortBlocks:
    """Return the short blocks that are prepared for ``target``, or new ones."""
    found = _PREPARED.get(target.model)
    return found.short_blocks if found is not None else ShortBlocks(list(target.parts.layers))
