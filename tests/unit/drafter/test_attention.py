from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from slipstream.drafter.attention import TILE, DenseAttention, TileMask, build_attention, dense_mask, predicate
from slipstream.errors import DrafterError
from support.drafting import draw_blocks, normal, packed_batch, tiny_drafter_config


def loop_mask(blocks, context, block_size, window):
    """The mask, one pair of query and key at a time, straight from its definition."""
    rows, number = blocks.anchors.shape
    mask = torch.zeros(rows, number * block_size, context + number * block_size, dtype=torch.bool)
    for row in range(rows):
        for n in range(number):
            anchor, start = int(blocks.anchors[row, n]), int(blocks.document_start[row, n])
            for slot in range(block_size):
                query = n * block_size + slot
                if blocks.keep[row, n]:
                    for j in range(context):
                        if start <= j < anchor and (not window or anchor + slot - j <= window - 1):
                            mask[row, query, j] = True
                for other in range(block_size):
                    if not window or other <= slot:
                        mask[row, query, context + n * block_size + other] = True
    return mask


CASES = [
    # documents of each row, row length, anchors, block size, window
    (([14, 26], [18, 9, 6]), 40, 7, 4, 0),
    (([14, 26], [18, 9, 6]), 40, 7, 4, 6),
    (([14, 26], [18, 9, 6]), 40, 7, 4, 1),
    (([2], [40]), 40, 5, 3, 0),
    (([40],), 40, 30, 10, 9),
]


@pytest.mark.parametrize(("documents", "context", "anchors", "block_size", "window"), CASES)
def test_dense_mask_equals_the_loop(documents, context, anchors, block_size, window):
    config = tiny_drafter_config(block_size=block_size)
    blocks = draw_blocks(packed_batch(documents, context), config, anchors)
    mask = dense_mask(
        blocks.anchors, blocks.document_start, blocks.keep, context=context, block_size=block_size, window=window
    )
    assert torch.equal(mask, loop_mask(blocks, context, block_size, window))
    assert bool(mask.any(-1).all())


TILED = [
    # documents of each row, row length, anchors, block size, window
    (([300, 84], [200]), 384, 40, 16, 0),
    (([300, 84], [200]), 384, 40, 16, 64),
    (([700],), 700, 64, 16, 0),  # context not a multiple of a tile: one tile holds context and blocks
    (([700],), 700, 61, 10, 150),  # nothing divides anything
    (([700],), 700, 33, 7, 0),
    (([900],), 1024, 8, 16, 0),  # full tiles
    (([500, 524],), 1024, 16, 16, 300),  # full tiles under a window
    (([50],), 64, 3, 4, 0),  # smaller than a tile
    (([50],), 64, 3, 4, 5),
    (([400],), 400, 2, 200, 0),  # blocks longer than a tile
    (([],), 256, 16, 16, 0),  # nothing kept at all
]


def assert_same_block_mask(ours, theirs):
    names = ["kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"]
    names += ["q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices"]
    for name in names:
        mine, reference = getattr(ours, name), getattr(theirs, name)
        assert mine.dtype == reference.dtype == torch.int32, name
        assert torch.equal(mine, reference), name
    assert ours.seq_lengths == theirs.seq_lengths
    assert ours.BLOCK_SIZE == theirs.BLOCK_SIZE


@pytest.mark.parametrize(("documents", "context", "anchors", "block_size", "window"), TILED)
def test_computed_block_mask_equals_the_one_from_the_dense_predicate(documents, context, anchors, block_size, window):
    config = tiny_drafter_config(block_size=block_size)
    batch = packed_batch(documents, context, supervised=0.97)
    rows, queries = len(documents), anchors * block_size
    tiles = TileMask(rows, context, anchors, block_size, window, torch.device("cpu"))
    pointers = [tiles.block_mask.kv_indices.data_ptr(), tiles.block_mask.full_q_indices.data_ptr()]
    for seed in range(3):
        blocks = draw_blocks(batch, config, anchors, seed)
        tiles.update(blocks.anchors, blocks.document_start, blocks.keep)
        mask = dense_mask(
            blocks.anchors, blocks.document_start, blocks.keep, context=context, block_size=block_size, window=window
        )
        theirs = create_block_mask(
            tiles.block_mask.mask_mod, rows, None, queries, context + queries, device="cpu", BLOCK_SIZE=TILE
        )
        assert_same_block_mask(tiles.block_mask, theirs)
        padded = torch.nn.functional.pad(
            mask, (0, tiles.key_tiles * TILE - mask.shape[2], 0, tiles.query_tiles * TILE - mask.shape[1])
        )
        counts = padded.view(rows, tiles.query_tiles, TILE, tiles.key_tiles, TILE).sum((2, 4))
        assert torch.equal(tiles.tile_counts(tiles.low, tiles.high).long(), counts)
    assert pointers == [tiles.block_mask.kv_indices.data_ptr(), tiles.block_mask.full_q_indices.data_ptr()]


@pytest.mark.parametrize(("documents", "context", "anchors", "block_size", "window"), CASES)
def test_nobody_sees_behind_the_end_of_a_short_block(documents, context, anchors, block_size, window):
    config = tiny_drafter_config(block_size=block_size)
    blocks = draw_blocks(packed_batch(documents, context), config, anchors)
    generator = torch.Generator().manual_seed(3)
    length = torch.randint(2, block_size + 1, blocks.anchors.shape, generator=generator)
    shapes = {"context": context, "block_size": block_size, "window": window}
    mask = dense_mask(blocks.anchors, blocks.document_start, blocks.keep, **shapes, length=length)
    expected = loop_mask(blocks, context, block_size, window)
    for row, block in itertools.product(range(len(documents)), range(anchors)):
        first = context + block * block_size
        expected[row, :, first + int(length[row, block]) : first + block_size] = False
    assert torch.equal(mask, expected)
    assert bool(mask.any(-1).all())


@pytest.mark.parametrize(
    ("documents", "context", "anchors", "block_size", "window"), [case for case in TILED if case[3] < TILE]
)
def test_tiles_are_sorted_as_the_predicate_sorts_them_when_blocks_are_short(
    documents, context, anchors, block_size, window
):
    config = tiny_drafter_config(block_size=block_size)
    batch = packed_batch(documents, context, supervised=0.97)
    rows, queries = len(documents), anchors * block_size
    tiles = TileMask(rows, context, anchors, block_size, window, torch.device("cpu"), lengths=True)
    for seed in range(3):
        blocks = draw_blocks(batch, config, anchors, seed, short_share=0.7)
        tiles.update(blocks.anchors, blocks.document_start, blocks.keep, blocks.length)
        assert torch.equal(tiles.length.long(), blocks.length)
        theirs = create_block_mask(
            tiles.block_mask.mask_mod, rows, None, queries, context + queries, device="cpu", BLOCK_SIZE=TILE
        )
        assert_same_block_mask(tiles.block_mask, theirs)
    tiles.update(blocks.anchors, blocks.document_start, blocks.keep)
    assert set(tiles.length.flatten().tolist()) == {block_size}


def test_lengths_that_nobody_looks_at_are_refused():
    blocks = draw_blocks(packed_batch([[40]], 40), tiny_drafter_config(block_size=4), 5, short_share=0.5)
    tiles = TileMask(1, 40, 5, 4, 0, torch.device("cpu"))
    with pytest.raises(DrafterError, match="this attention was built without"):
        tiles.update(blocks.anchors, blocks.document_start, blocks.keep, blocks.length)
    with pytest.raises(DrafterError, match="blocks of 128 slots may not have lengths"):
        TileMask(1, 40, 5, 128, 0, torch.device("cpu"), lengths=True)


def test_some_tiles_are_full_and_most_are_skipped():
    config = tiny_drafter_config(block_size=16)
    tiles = TileMask(1, 1024, 16, 16, 0, torch.device("cpu"))
    blocks = draw_blocks(packed_batch([[1024]], 1024, supervised=1.0), config, 16)
    tiles.update(blocks.anchors, blocks.document_start, blocks.keep)
    assert tiles.block_mask.full_kv_num_blocks.sum() > 0
    partial, full = tiles.block_mask.kv_num_blocks.sum(), tiles.block_mask.full_kv_num_blocks.sum()
    assert partial + full < tiles.query_tiles * tiles.key_tiles


def test_the_refresh_traces_as_one_graph():
    config = tiny_drafter_config(block_size=8)
    batch = packed_batch([[200, 56]], 256)
    eager, traced = (TileMask(1, 256, 20, 8, 40, torch.device("cpu")) for _ in range(2))
    torch._dynamo.reset()
    update = torch.compile(traced.update, fullgraph=True, dynamic=False, backend="aot_eager")
    blocks = draw_blocks(batch, config, 20)
    for tiles, refresh in ((eager, eager.update), (traced, update)):
        refresh(blocks.anchors, blocks.document_start, blocks.keep)
        assert tiles.low.any()
    assert_same_block_mask(traced.block_mask, eager.block_mask)


def test_dense_attention_ignores_what_the_mask_hides():
    config = tiny_drafter_config(sliding=5)
    batch = packed_batch([[14, 26]], 40)
    blocks = draw_blocks(batch, config, 6)
    attention = DenseAttention(config, 40)
    attention.update(blocks.anchors, blocks.document_start, blocks.keep)
    q, k, v = normal(1, 4, 24, 16), normal(1, 2, 64, 16, seed=1), normal(1, 2, 64, 16, seed=2)
    for layer, window in enumerate((5, 0)):
        mask = loop_mask(blocks, 40, 4, window)[:, None]
        scores = (q.view(1, 2, 2, 24, 16) @ k[:, :, None].transpose(-1, -2)) / 4
        weights = scores.masked_fill(~mask[:, None], float("-inf")).softmax(-1)
        expected = (weights @ v[:, :, None]).view(1, 4, 24, 16)
        torch.testing.assert_close(attention(layer, q, k, v), expected, atol=1e-6, rtol=1e-5)


def test_the_kind_is_chosen_openly():
    config = tiny_drafter_config()
    assert build_attention("auto", config, 1, 8, 2, "cpu").kind == "dense"
    assert build_attention("dense", config, 1, 8, 2, torch.device("cpu")).kind == "dense"
    with pytest.raises(DrafterError, match="flex, but the device is cpu; use auto or dense"):
        build_attention("flex", config, 1, 8, 2, "cpu")
    with pytest.raises(DrafterError, match="'sdpa'"):
        build_attention("sdpa", config, 1, 8, 2, "cpu")


def test_the_predicate_takes_scalars():
    low, high = torch.tensor([[0, 3]], dtype=torch.int32), torch.tensor([[2, 6]], dtype=torch.int32)
    allow = predicate(low, high, 8, 2, 0)
    zero = torch.tensor(0)
    seen = [[int(allow(zero, zero, torch.tensor(q), torch.tensor(j))) for j in range(12)] for q in range(4)]
    assert seen[0] == seen[1] == [1, 1, 0, 0, 0, 0, 0, 0, 1, 1, 0, 0]
    assert seen[2] == seen[3] == [0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 1, 1]
