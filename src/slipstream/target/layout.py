"""Where the documents of a packed batch lie, worked out on the host, and how they are set apart from each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slipstream.errors import TargetError
from slipstream.records import PackedBatch

if TYPE_CHECKING:
    from slipstream.target.model import TargetInfo

_ROUND = 32  # padded lengths are multiples of this, so that kernels that tune for each length see few of them
# A row of its own costs a document its padding, a group of its own one more call of every recurrent module.
_LIKE_LENGTH = 0.8


@dataclass(frozen=True, slots=True)
class Document:
    """Tokens ``start`` to ``end`` of ``row``."""

    row: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class DocumentLayout:
    """The documents of a batch in order of rows; ``tokens`` is the row length."""

    documents: tuple[Document, ...]
    tokens: int


@dataclass(frozen=True, slots=True)
class PaddedGroup:
    """Documents of like length as right-padded rows; all index tensors int64 on the CPU.

    source [documents, length]: flat index into the batch of each token (padding repeats the last token);
    inside [n]: flat index into the padded rows of each real token; place [n]: its flat index in the batch.
    """

    source: Tensor
    inside: Tensor
    place: Tensor


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Rows of another shape for tokens of a batch, with zeros in all other places; int64 tensors.

    shape: (rows, length) of the new rows; inside [n]: flat index in them of each token; place [n]: its flat index in
    the batch. bounds [documents + 1]: where the documents begin, each with its zeros, if one row holds them all; None
    if each has a row.
    """

    shape: tuple[int, int]
    inside: Tensor
    place: Tensor
    bounds: Tensor | None = None

    def to(self, device: torch.device) -> Arrangement:
        """Return the arrangement with its tensors on ``device``."""
        return Arrangement(
            shape=self.shape,
            inside=self.inside.to(device, non_blocking=True),
            place=self.place.to(device, non_blocking=True),
            bounds=None if self.bounds is None else self.bounds.to(device, non_blocking=True),
        )


def document_layout(batch: PackedBatch, info: TargetInfo) -> DocumentLayout:
    """Return where the documents lie. Copies ids, document ids and positions to the host if they are elsewhere.

    Raises TargetError for ids outside the embedding, a document longer than the target's positions, and positions that
    do not count from 0 in each document (packed documents would then be joined).
    """
    ids, numbers, positions = batch.ids.cpu(), batch.document_ids.cpu(), batch.positions.cpu()
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= info.vocab_rows:
        bad = low if low < 0 else high
        raise TargetError(
            f"batch {batch.index}: token id {bad} is outside the target's {info.vocab_rows} embedding rows; "
            "the data were prepared with another tokenizer"
        )
    rows, tokens = numbers.shape
    starts = torch.ones_like(numbers, dtype=torch.bool)
    starts[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
    index = torch.arange(tokens).expand(rows, tokens)
    begin = torch.where(starts, index, 0).cummax(dim=1).values
    expected = torch.where(numbers >= 0, index - begin, 0)
    if not torch.equal(expected, positions):
        row = int((expected != positions).any(dim=1).nonzero()[0])
        raise TargetError(
            f"batch {batch.index}: positions of row {row} do not count from 0 in each document; prepare the data again"
        )
    longest = int(positions.max()) + 1
    if info.max_positions and longest > info.max_positions:
        raise TargetError(
            f"batch {batch.index}: a document has {longest} tokens but the target has {info.max_positions} positions; "
            f"set data.row_length to {info.max_positions} or less"
        )
    documents = []
    for row, start in starts.nonzero().tolist():
        if numbers[row, start] >= 0:
            following = starts[row, start + 1 :].nonzero()
            end = start + 1 + int(following[0]) if len(following) else tokens
            documents.append(Document(row, start, end))
    return DocumentLayout(tuple(documents), tokens)


def padded_groups(layout: DocumentLayout, budget: int) -> Iterator[PaddedGroup]:
    """Yield the documents, longest first, in groups of at most ``budget`` padded tokens (one document at least)."""
    waiting = sorted(layout.documents, key=_length, reverse=True)
    while waiting:
        length = _rounded(_length(waiting[0]))
        count = max(1, budget // length)
        group, waiting = waiting[:count], waiting[count:]
        begin = torch.tensor([d.row * layout.tokens + d.start for d in group])[:, None]
        size = torch.tensor([_length(d) for d in group])[:, None]
        step = torch.arange(length)[None, :]
        source = begin + torch.minimum(step, size - 1)
        inside = (step < size).flatten().nonzero().flatten()
        yield PaddedGroup(source=source, inside=inside, place=source.flatten()[inside])


def a_row_each(layout: DocumentLayout) -> tuple[Arrangement, ...]:
    """Return arrangements in which each document has a right-padded row, beside documents of like length."""
    groups: list[list[Document]] = []
    for document in sorted(layout.documents, key=_length, reverse=True):
        if not groups or _rounded(_length(document)) <= _LIKE_LENGTH * _rounded(_length(groups[-1][0])):
            groups.append([])
        groups[-1].append(document)
    arrangements = []
    for group in groups:
        length = _rounded(_length(group[0]))
        starts = range(0, len(group) * length, length)
        arrangements.append(Arrangement((len(group), length), *_indices(group, starts, layout.tokens)))
    return tuple(arrangements)


def one_row(layout: DocumentLayout, gap: int) -> Arrangement:
    """Return the arrangement of all documents in one row, each followed by at least ``gap`` zeros.

    The row's length is rounded, as kernels may tune for each; the zeros for that belong to the last document.
    """
    starts, end = [], 0
    for document in layout.documents:
        starts.append(end)
        end += _length(document) + gap
    unit = max(_ROUND, 1 << max(0, end.bit_length() - 5))  # at most a sixteenth more
    end = -(-end // unit) * unit
    inside, place = _indices(layout.documents, starts, layout.tokens)
    return Arrangement((1, end), inside, place, torch.tensor([*starts, end]))


def _indices(documents: Sequence[Document], starts: Sequence[int], tokens: int) -> tuple[Tensor, Tensor]:
    """Return where the documents' tokens are if they begin at flat index ``starts``, and where they are in the batch.

    Worked out for all tokens at once: a loop over documents would take its time at every batch.
    """
    size = torch.tensor([_length(d) for d in documents])
    step = torch.arange(int(size.sum())) - torch.repeat_interleave(size.cumsum(0) - size, size)
    begin = torch.tensor([d.row * tokens + d.start for d in documents])
    return tuple(torch.repeat_interleave(at, size) + step for at in (torch.tensor(starts), begin))  # type: ignore[return-value]


def _length(document: Document) -> int:
    """Return the tokens of a document."""
    return document.end - document.start


def _rounded(length: int) -> int:
    """Return ``length`` rounded up."""
    return -(-length // _ROUND) * _ROUND
