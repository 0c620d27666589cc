"""Where the documents of a packed batch lie, worked out on the host, and how they are grouped to be read alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slipstream.errors import TargetError
from slipstream.records import PackedBatch

if TYPE_CHECKING:
    from slipstream.target.model import TargetInfo

_ROUND = 32  # padded lengths are multiples of this, so that kernels that tune for each length see few of them


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
    waiting = sorted(layout.documents, key=lambda d: d.start - d.end)
    while waiting:
        length = -(-(waiting[0].end - waiting[0].start) // _ROUND) * _ROUND
        count = max(1, budget // length)
        group, waiting = waiting[:count], waiting[count:]
        begin = torch.tensor([d.row * layout.tokens + d.start for d in group])[:, None]
        size = torch.tensor([d.end - d.start for d in group])[:, None]
        step = torch.arange(length)[None, :]
        source = begin + torch.minimum(step, size - 1)
        inside = (step < size).flatten().nonzero().flatten()
        yield PaddedGroup(source=source, inside=inside, place=source.flatten()[inside])
