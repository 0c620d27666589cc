from __future__ import annotations

import dataclasses

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.drafter.anchors import blocks_at, draw_anchors, sample_blocks, valid_anchors
from support.drafting import MASK_ID, packed_batch

LENGTH = 32


@st.composite
def cases(draw):
    """A batch of one to three rows of packed documents, a number of anchors, a block size and a seed."""
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        lengths, room = [], LENGTH
        while room and draw(st.booleans()):
            lengths.append(draw(st.integers(1, room)))
            room -= lengths[-1]
        rows.append(lengths)
    supervised = draw(st.sampled_from([0.0, 0.3, 0.8, 1.0]))
    batch = packed_batch(rows, LENGTH, seed=draw(st.integers(0, 99)), supervised=supervised)
    return batch, draw(st.integers(1, 40)), draw(st.integers(2, 9)), draw(st.integers(0, 99))


def sample(batch, anchors, block_size, seed):
    draw = torch.Generator().manual_seed(seed)
    return sample_blocks(batch, anchors=anchors, block_size=block_size, mask_token_id=MASK_ID, generator=draw)


def loop_valid(batch, row):
    """The rule, one token at a time."""
    mask, document = batch.loss_mask[row].tolist(), batch.document_ids[row].tolist()
    return [
        a for a in range(LENGTH - 1) if mask[a] and mask[a + 1] and document[a] == document[a + 1] and document[a] != -1
    ]


@settings(max_examples=80, deadline=None)
@given(cases())
def test_blocks_hold_the_rules(case):
    batch, anchors, block_size, seed = case
    blocks = sample(batch, anchors, block_size, seed)
    rows = batch.ids.shape[0]
    assert blocks.anchors.shape == blocks.keep.shape == blocks.document_start.shape == (rows, anchors)
    assert blocks.labels.shape == blocks.valid.shape == (rows, anchors, block_size - 1)
    assert blocks.noise_ids.shape == blocks.positions.shape == (rows, anchors, block_size)
    for row in range(rows):
        allowed = loop_valid(batch, row)
        kept = blocks.anchors[row][blocks.keep[row]].tolist()
        assert len(kept) == min(anchors, len(allowed))
        assert set(kept) <= set(allowed)
        assert kept == sorted(set(kept))
        assert blocks.anchors[row].tolist() == sorted(blocks.anchors[row].tolist())
        assert blocks.keep[row].tolist() == sorted(blocks.keep[row].tolist(), reverse=True)
        assert not blocks.valid[row][~blocks.keep[row]].any()
        ids, mask = batch.ids[row].tolist(), batch.loss_mask[row].tolist()
        document = batch.document_ids[row].tolist()
        for n, a in enumerate(kept):
            reach = 0
            while a + reach + 1 < LENGTH and mask[a + reach + 1] and document[a + reach + 1] == document[a]:
                reach += 1
            expected = [k <= reach for k in range(1, block_size)]
            assert expected[0]
            assert blocks.valid[row, n].tolist() == expected
            for k in range(1, min(reach, block_size - 1) + 1):
                assert blocks.labels[row, n, k - 1] == ids[a + k]
            assert blocks.noise_ids[row, n].tolist() == [ids[a]] + [MASK_ID] * (block_size - 1)
            first = int(batch.positions[row, a])
            assert blocks.positions[row, n].tolist() == list(range(first, first + block_size))
            assert blocks.document_start[row, n] == document.index(document[a])
    again = sample(batch, anchors, block_size, seed)
    assert blocks.length is None
    for name in {field.name for field in dataclasses.fields(blocks)} - {"length"}:
        assert torch.equal(getattr(blocks, name), getattr(again, name))


def test_another_seed_draws_other_anchors():
    batch = packed_batch([[LENGTH]], LENGTH, supervised=1.0)
    draws = {tuple(sample(batch, 6, 4, seed).anchors[0].tolist()) for seed in range(20)}
    assert len(draws) > 15


def test_the_draw_is_uniform_over_valid_tokens():
    batch = packed_batch([[20, 12]], LENGTH, supervised=0.8, seed=3)
    valid = valid_anchors(batch)
    count = torch.zeros(LENGTH)
    draw = torch.Generator().manual_seed(0)
    rounds, number = 4000, 4
    for _ in range(rounds):
        anchors, keep = draw_anchors(valid, number, draw)
        assert bool(keep.all())
        count[anchors[0]] += 1
    assert not count[~valid[0]].any()
    share = count[valid[0]] / rounds
    expected = number / int(valid.sum())
    assert (share - expected).abs().max() < 5 * (expected / rounds) ** 0.5


def test_every_valid_token_is_taken_when_there_are_fewer_than_anchors():
    batch = packed_batch([[10, 10], [5]], LENGTH, seed=1)
    blocks = sample(batch, 64, 4, 0)
    for row in range(2):
        assert blocks.anchors[row][blocks.keep[row]].tolist() == loop_valid(batch, row)


def test_supervision_stops_at_the_first_hole_and_at_the_documents_end():
    batch = packed_batch([[8, 8]], 16, supervised=1.0)
    batch.loss_mask[0, 3] = False
    blocks = blocks_at(
        batch, torch.tensor([[1, 5, 13]]), torch.ones(1, 3, dtype=torch.bool), block_size=6, mask_token_id=MASK_ID
    )
    assert blocks.valid[0].tolist() == [
        [True, False, False, False, False],  # token 3 is not supervised: 4 to 6 are not either
        [True, True, False, False, False],  # token 8 is another document's
        [True, True, False, False, False],  # the row ends at 15
    ]


def test_a_row_without_a_valid_anchor_is_all_padding():
    batch = packed_batch([[LENGTH], [1, 1, 1], []], LENGTH, supervised=1.0)
    batch.loss_mask[0] = False
    batch.loss_mask[0, ::2] = True
    blocks = sample(batch, 5, 4, 0)
    assert not blocks.keep.any()
    assert not blocks.valid.any()
    assert bool((blocks.anchors == LENGTH - 1).all())


def test_short_blocks_leave_the_anchors_and_carry_no_loss_behind_their_end():
    batch = packed_batch([[LENGTH] for _ in range(40)], LENGTH, supervised=1.0)
    generators = [torch.Generator().manual_seed(4) for _ in range(2)]
    whole, short = (
        sample_blocks(batch, anchors=20, block_size=8, mask_token_id=MASK_ID, generator=g, short_share=share)
        for g, share in zip(generators, (0.0, 0.6), strict=True)
    )
    assert whole.length is None
    assert torch.equal(whole.anchors, short.anchors)
    assert short.length.dtype == torch.int64
    counts = torch.bincount(short.length.flatten(), minlength=9)
    assert counts[:2].sum() == 0
    assert abs(counts[8] / 800 - 0.4) < 0.06
    assert all(abs(count / 800 - 0.1) < 0.04 for count in counts[2:8])
    slots = torch.arange(1, 8)
    assert torch.equal(short.valid, whole.valid & (slots < short.length[..., None]))
    assert torch.equal(short.noise_ids, whole.noise_ids)
    again = sample_blocks(
        batch, anchors=20, block_size=8, mask_token_id=MASK_ID, generator=torch.Generator().manual_seed(4),
        short_share=0.6,
    )  # fmt: skip
    assert torch.equal(again.length, short.length)
