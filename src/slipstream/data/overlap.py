"""Held-out prompts that stand at the head of a training document: what is measured on them was learned by heart."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from slipstream.data.pack import PackedDataset

# An odd multiplier has an inverse modulo 2**64, so that any prefix's hash follows from one running sum.
_BASE = 0x9E3779B97F4A7C15
_INVERSE = pow(_BASE, -1, 2**64)
_TOKENS = 4_000_000  # looked at together: 100 MB of running sums


def heldout_in_training(dataset: PackedDataset, prompts: Sequence[Sequence[int]]) -> list[int]:
    """Return the indices of the ``prompts`` (token ids) with which a document of ``dataset`` begins. Thread-safe.

    Compared as rendered, template included, so a prompt that differs in one space is another prompt. Every document is
    looked at once, by 64-bit polynomial hashes of its prefixes; a hit is compared token by token.
    """
    by_length: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for index, prompt in enumerate(prompts):
        if len(prompt):
            by_length[len(prompt)][int(_sums(np.asarray(prompt))[-1])].append(index)
    found: set[int] = set()
    for ids, starts in dataset.token_chunks(_TOKENS):
        sums = np.concatenate([np.zeros(1, np.uint64), _sums(ids)])
        lengths = np.diff(starts)
        shift = _powers(_INVERSE, int(starts[-1]) + 1)[starts[:-1]]
        for length, wanted in by_length.items():
            long = np.flatnonzero(lengths >= length)
            begins = starts[:-1][long]
            hashes = (sums[begins + length] - sums[begins]) * shift[long]
            for place in np.flatnonzero(np.isin(hashes, np.fromiter(wanted, np.uint64))):
                begin = int(begins[place])
                for index in wanted[int(hashes[place])]:
                    if index not in found and np.array_equal(ids[begin : begin + length], prompts[index]):
                        found.add(index)
    return sorted(found)


def overlap_warning(found: Sequence[int], prompts: int) -> str:
    """Return the line that tells of prompts found in the training data."""
    first = ", ".join(map(str, found[:5])) + (", ..." if len(found) > 5 else "")
    return (
        f"warning: {len(found)} of {prompts} held-out prompts (number {first}) also begin a training document: "
        "acceptance on them is not held out; take them out of data.train or data.heldout"
    )


def _powers(base: int, count: int) -> np.ndarray:
    """Return base**0 .. base**(count-1) modulo 2**64, uint64 [count]."""
    powers = np.full(count, np.uint64(base))
    powers[0] = 1
    return np.multiply.accumulate(powers, dtype=np.uint64)


def _sums(ids: np.ndarray) -> np.ndarray:
    """Return the running sums of (id + 1) * base**place modulo 2**64, uint64 [tokens]."""
    values = ids.astype(np.uint64) + np.uint64(1)
    return np.cumsum(values * _powers(_BASE, len(ids)), dtype=np.uint64)
