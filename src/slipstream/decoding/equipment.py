"""What a target and a drafter get before the clock starts: made once for all decoding runs inside one context."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from torch import nn

from slipstream.compilation.tuning_counts import tune_for_any_count
from slipstream.decoding.packed import packed_linears
from slipstream.decoding.short_states import ShortBlocks

if TYPE_CHECKING:
    from slipstream.target.model import Target


@dataclass(frozen=True, slots=True)
class Equipment:
    """The short blocks of a target's recurrent layers, and "" or why its linear layers are as they were."""

    short_blocks: ShortBlocks
    linears: str


_EQUIPPED: WeakKeyDictionary[nn.Module, Equipment] = WeakKeyDictionary()


@contextlib.contextmanager
def equipped(target: Target, network: nn.Module | None = None) -> Iterator[Equipment]:
    """Equip ``target`` and ``network`` (a drafter) for decoding while entered. Weights must not change inside.

    On a CPU their linear layers are laid out once and recurrent layers get short blocks; a GPU needs neither, but its
    kernels must not be tuned anew whenever a row ends.
    Entered again for the same target, only a network that is new is equipped. Thread-safe as the target is.
    """
    if target.device.type == "cuda":
        tune_for_any_count()
    found = _EQUIPPED.get(target.model)
    if found is not None:
        with packed_linears(network):
            yield found
        return
    # Not the whole model: a multimodal one has layers that no text goes through.
    with packed_linears(target.parts.decoder, target.parts.lm_head, network) as reason:
        made = _EQUIPPED[target.model] = Equipment(ShortBlocks(list(target.parts.layers)), reason)
        try:
            yield made
        finally:
            del _EQUIPPED[target.model]


def short_blocks(target: Target) -> ShortBlocks:
    """Return the short blocks that ``target`` is equipped with, or new ones."""
    found = _EQUIPPED.get(target.model)
    return found.short_blocks if found is not None else ShortBlocks(list(target.parts.layers))
