"""Whether a target's packed documents have the features that they have alone: tried, never taken on trust."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from slipstream.data.reason import one_line
from slipstream.errors import TargetError
from slipstream.records import PackedBatch
from slipstream.target.layout import DocumentLayout, document_layout
from slipstream.target.model import Target, tokenizer_entries

# float32 on a CPU: every token of every tap must agree. Otherwise rounding differs with the shape of a matmul, so that
# a change in other documents must leave a document (nearly) as it was, half of its tokens must be as alone, and half of
# those at a document's start no further from it than rounding takes the others: what is lost there is forgotten later.
_TOLERANCE = 1e-3
_LEAK_TOLERANCE_LOW = 2e-2
_MEDIAN_TOLERANCE_LOW = 0.1
_START = 4
_START_TOLERANCE_LOW = 2e-2
_START_FACTOR = 4

Read = Callable[[PackedBatch, DocumentLayout], Tensor]

# Documents shorter than a convolution, beside each other too, and one longer than the delta rule's chunk of 64 tokens.
_LENGTHS = ((3, 14, 26, 1), (18, 70), (2, 1, 1, 40, 30))
_TOKENS = 88


class PackingProbe:
    """Two small packed batches, the second with other tokens in every other document.

    alone: the features ``[tokens, taps * H]`` of ids ``int64 [1, tokens]`` that stand alone.
    """

    def __init__(self, target: Target, taps: int, alone: Callable[[Tensor], Tensor]) -> None:
        self._target = target
        self._taps = taps
        self._read_alone = alone
        first, second = probe_batches(target)
        self.layout = document_layout(first, target.info)
        self._first, self._second = first.to(target.device), second.to(target.device)

    @cached_property
    def _alone(self) -> list[Tensor]:
        """Each document's features, calculated when they are needed."""
        documents = self.layout.documents
        return [self._read_alone(self._first.ids[d.row : d.row + 1, d.start : d.end]) for d in documents]

    @torch.no_grad()
    def judge(self, packed: Read, blame: str, without: Read | None = None) -> tuple[str, float]:
        """Return why features ``[R, S, taps * H]`` that ``packed`` reads are wrong, or nothing; and by how much.

        The first begins with ``blame`` where values differ. The second is the largest relative difference to a document
        alone; 0.0 where rows were refused. ``without``: as ``packed``, but without the bounds of documents. If it reads
        the same to the bit they are ignored, and right here only because the states of short documents fade.
        """
        target = self._target
        exact = target.dtype == torch.float32 and target.device.type == "cpu"
        try:
            read = packed(self._first, self.layout)
            other = None if exact else packed(self._second, self.layout)
        except (ValueError, TypeError, NotImplementedError, TargetError) as error:
            return f"it refuses packed rows: {one_line(error)}", 0.0
        parity, starts, leak = [], [], [torch.zeros(1)]
        for document, alone in zip(self.layout.documents, self._alone, strict=True):
            place = (document.row, slice(document.start, document.end))
            parity.append(self._difference(read[place], alone))
            starts.append(parity[-1][: _START * self._taps])
            if other is not None and torch.equal(self._first.ids[place], self._second.ids[place]):
                leak.append(self._difference(read[place], other[place]))
        apart, leaked = torch.cat(parity), torch.cat(leak)
        difference = float(apart.max())
        if exact:
            sound = difference <= _TOLERANCE
        else:
            # Experts get other numbers of tokens when other documents change; rounding may then reroute a few tokens.
            reached, middle = leaked.quantile(0.75 if target.info.is_moe else 1.0), float(apart.median())
            sound = float(reached) <= _LEAK_TOLERANCE_LOW and middle <= _MEDIAN_TOLERANCE_LOW
            sound &= float(torch.cat(starts).median()) <= _START_TOLERANCE_LOW + _START_FACTOR * middle
        told = f"{blame} (packed and alone differ by {difference:.2g} of a feature's size)"
        if sound and without is not None and torch.equal(read, without(self._first, self.layout)):
            sound, told = False, "its kernels ignore the bounds of documents"
        return "" if sound else told, difference

    def _difference(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the relative difference of each token and tap of two ``[tokens, taps * H]``, on the CPU."""
        a, b = (t.float().reshape(len(t), self._taps, -1) for t in (a, b))
        relative: Tensor = (a - b).norm(dim=-1) / b.norm(dim=-1).clamp_min(1e-12)
        return relative.flatten().cpu()


def probe_batches(target: Target) -> tuple[PackedBatch, PackedBatch]:
    """Return the two batches, on the CPU."""
    generator = torch.Generator().manual_seed(0)
    entries = tokenizer_entries(target.tokenizer)
    shape = (len(_LENGTHS), _TOKENS)
    ids = torch.randint(entries, shape, generator=generator)
    changed = torch.randint(entries, shape, generator=generator)
    documents = torch.full(shape, -1)
    positions = torch.zeros(shape, dtype=torch.long)
    number = 0
    for row, lengths in enumerate(_LENGTHS):
        start = 0
        for wanted in lengths:
            length = min(wanted, target.info.max_positions or wanted)
            place = (row, slice(start, start + length))
            documents[place], positions[place] = number, torch.arange(length)
            if number % 2:
                changed[place] = ids[place]
            number, start = number + 1, start + length
    mask = documents >= 0
    return tuple(  # type: ignore[return-value]
        PackedBatch(index=-1, ids=i, loss_mask=mask, document_ids=documents, positions=positions)
        for i in (ids, changed)
    )
