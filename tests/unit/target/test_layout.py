from __future__ import annotations

import dataclasses

import pytest
import torch

from slipstream.errors import TargetError
from slipstream.target.layout import Document, a_row_each, document_layout, one_row, padded_groups
from unit.target.conftest import LENGTHS, TOKENS, documents_of, packed_batch


@pytest.fixture
def info(target_of):
    return target_of("llama").info


def test_documents_are_found(info):
    layout = document_layout(packed_batch(), info)
    assert layout.tokens == TOKENS
    assert [(d.row, d.start, d.end) for d in layout.documents] == [
        (row, place.start, place.stop) for row, place in documents_of(packed_batch())
    ]
    assert layout.documents[:2] == (Document(0, 0, 3), Document(0, 3, 33))


def test_row_of_padding_only_has_no_document(info):
    assert document_layout(packed_batch(((5,), ())), info).documents == (Document(0, 0, 5),)


@pytest.mark.parametrize("budget", [1, 64, 100, 1000])
def test_groups_cover_every_token_once_within_the_budget(info, budget):
    batch = packed_batch()
    seen = torch.zeros(batch.ids.numel(), dtype=torch.long)
    for group in padded_groups(document_layout(batch, info), budget):
        documents, length = group.source.shape
        assert length % 32 == 0
        assert documents * length <= budget or documents == 1
        seen[group.place] += 1
        assert torch.equal(group.source.flatten()[group.inside], group.place)
        # Within a row of the group, all tokens are of one document, in order.
        numbers = batch.document_ids.flatten()[group.source]
        assert torch.equal(numbers, numbers[:, :1].expand_as(numbers))
    assert torch.equal(seen, (batch.document_ids >= 0).flatten().long())


def test_long_documents_do_not_widen_short_ones(info):
    sizes = [tuple(g.source.shape) for g in padded_groups(document_layout(packed_batch(), info), budget=96)]
    assert sizes[0] == (1, 96)
    assert sum(n for n, _ in sizes) == sum(len(row) for row in LENGTHS)
    assert sizes == sorted(sizes, key=lambda size: -size[1])


@pytest.mark.parametrize(("bad", "shown"), [(-1, -1), (320, 320), (10**6, 10**6)])
def test_ids_outside_the_embedding(info, bad, shown):
    batch = packed_batch()
    batch.ids[2, 3] = bad
    with pytest.raises(TargetError, match=f"batch 7: token id {shown} is outside the target's 320 embedding rows"):
        document_layout(batch, info)


def test_positions_that_would_join_documents(info):
    batch = packed_batch()
    positions = batch.positions.clone()
    positions[1, 70:90] += 70
    with pytest.raises(TargetError, match="batch 7: positions of row 1 do not count from 0"):
        document_layout(dataclasses.replace(batch, positions=positions), info)


def test_documents_longer_than_the_target_reads(info):
    short = dataclasses.replace(info, max_positions=89)
    with pytest.raises(
        TargetError, match=r"a document has 90 tokens but the target has 89 positions; set data\.row_length"
    ):
        document_layout(packed_batch(), short)
    document_layout(packed_batch(), dataclasses.replace(info, max_positions=90))
    document_layout(packed_batch(), dataclasses.replace(info, max_positions=0))  # 0: the target names no limit


MANY = ((3, 30, 1, 40), (70, 20, 4), (90,), (1,) * 90)


def test_rows_of_their_own_hold_every_token_once_beside_documents_of_like_length(info):
    batch = packed_batch(MANY)
    seen = torch.zeros(batch.ids.numel(), dtype=torch.long)
    arranged = a_row_each(document_layout(batch, info))
    for one in arranged:
        rows, length = one.shape
        assert one.bounds is None
        seen[one.place] += 1
        number = torch.full((rows * length,), -1)
        number[one.inside] = batch.document_ids.flatten()[one.place]
        position = torch.zeros(rows * length, dtype=torch.long)
        position[one.inside] = batch.positions.flatten()[one.place]
        for row in range(rows):
            size = int((number.view(rows, length)[row] >= 0).sum())
            assert size > 0
            assert torch.equal(position.view(rows, length)[row, :size], torch.arange(size))  # padding behind it
            assert len(set(number.view(rows, length)[row, :size].tolist())) == 1
            assert -(-size // 32) * 32 > 0.8 * length
    assert torch.equal(seen, (batch.document_ids >= 0).flatten().long())
    assert [one.shape for one in arranged] == [(2, 96), (1, 64), (95, 32)]


@pytest.mark.parametrize("gap", [0, 1, 3])
def test_one_row_holds_every_token_in_order_with_zeros_behind_each_document(info, gap):
    layout = document_layout(packed_batch(MANY), info)
    one = one_row(layout, gap)
    assert one.bounds is not None
    assert one.shape == (1, int(one.bounds[-1]))
    assert one.shape[1] % 32 == 0
    for number, document in enumerate(layout.documents):
        size, start = document.end - document.start, int(one.bounds[number])
        where = (one.inside >= start) & (one.inside < int(one.bounds[number + 1]))
        assert torch.equal(one.inside[where], torch.arange(start, start + size))
        first = document.row * TOKENS + document.start
        assert torch.equal(one.place[where], torch.arange(first, first + size))
        behind = int(one.bounds[number + 1]) - start - size
        assert behind == gap if number + 1 < len(layout.documents) else behind >= gap


def test_the_length_of_one_row_is_one_of_few(info):
    lengths = {
        one_row(document_layout(packed_batch(((n, 90 - n), (80, m))), info), 3).shape[1]
        for n in range(1, 40)
        for m in range(1, 17)
    }
    assert len(lengths) <= 2


def test_arrangements_are_moved_whole(info):
    layout = document_layout(packed_batch(), info)
    for one in (*a_row_each(layout), one_row(layout, 3)):
        there = one.to(torch.device("meta"))
        assert there.shape == one.shape
        assert there.inside.is_meta
        assert there.place.is_meta
        assert (there.bounds is None) == (one.bounds is None)
        assert there.bounds is None or there.bounds.is_meta
