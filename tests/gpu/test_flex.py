"""Flex attention on a GPU: equal to the dense reference, block-sparse, refreshed without a host sync or a recompile.

Nearly all of the time is compilation: with pytest-xdist, ``-n 8`` takes about a minute.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from slipstream.compilation.guard import compiled_flex_attention
from slipstream.drafter.anchors import sample_blocks
from slipstream.drafter.attention import TILE, DenseAttention, FlexAttention, TileMask, build_attention
from slipstream.drafter.loss import chunked_loss, naive_loss
from slipstream.drafter.model import DraftModel
from slipstream.errors import CompilationError, DrafterError
from support.drafting import draw_blocks, normal, packed_batch, randomise, tiny_drafter_config

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")


@pytest.fixture(autouse=True)
def fresh_compiler():
    """Forget compiled shapes, so that no test meets another's recompile limit."""
    torch._dynamo.reset()


def model_config(**changes):
    base = {"hidden_size": 128, "intermediate_size": 256, "heads": 8, "kv_heads": 2, "head_dim": 64, "block_size": 16}
    return tiny_drafter_config(**{**base, **changes})


SHAPES = [
    # documents of each row, row length, anchors, block size, window
    (([300, 84], [200]), 384, 40, 16, 64),
    (([700],), 700, 61, 10, 150),
    (([700],), 700, 33, 7, 0),
    (([1000], [500, 300]), 1024, 24, 16, 300),
    (([50], []), 64, 3, 4, 5),
    (([], []), 256, 16, 16, 0),
    (([100, 60], [150], [192], [9]), 192, 12, 8, 0),  # fewer queries than a tile: the decoding kernel has no such shape
]


@pytest.mark.parametrize("short_share", [0.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("documents", "context", "anchors", "block_size", "window"), SHAPES)
def test_flex_equals_dense_in_values_and_gradients(documents, context, anchors, block_size, window, dtype, short_share):
    config = model_config(block_size=block_size, sliding=window)
    rows, queries = len(documents), anchors * block_size
    batch = packed_batch(documents, context, supervised=0.97).to(DEVICE)
    blocks = draw_blocks(batch, config, anchors, short_share=short_share)
    flex = build_attention("auto", config, rows, context, anchors, DEVICE, lengths=short_share > 0)
    assert isinstance(flex, FlexAttention)
    dense = DenseAttention(config, context)
    for attention in (flex, dense):
        attention.update(blocks.anchors, blocks.document_start, blocks.keep, blocks.length)
    upstream = normal(rows, 8, queries, 64, seed=7).to(DEVICE)
    for layer in range(config.layers):
        results = []
        for attention, working in ((flex, dtype), (dense, torch.float64)):
            leaves = [
                normal(rows, heads, length, 64, seed=heads + length).to(DEVICE, dtype).to(working).requires_grad_()
                for heads, length in ((8, queries), (2, context + queries), (2, context + queries))
            ]
            out = attention(layer, *leaves)
            out.backward(upstream.to(working))
            results.append([out.detach().double(), *(leaf.grad.double() for leaf in leaves)])
        tolerance = 1e-4 if dtype == torch.float32 else 0.03
        for name, ours, exact in zip(("out", "dq", "dk", "dv"), *results, strict=True):
            assert bool(ours.isfinite().all()), name
            error = (ours - exact).abs().max() / exact.abs().max().clamp(min=1e-3)
            assert error < tolerance, (name, layer, error)


def test_heads_that_are_too_small_are_refused():
    with pytest.raises(DrafterError, match=r"head_dim is 8; .* training\.attention = dense"):
        build_attention("auto", model_config(head_dim=8), 1, 64, 4, DEVICE)


@pytest.mark.parametrize("sliding", [0, 100])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_whole_step_equals_the_dense_and_naive_reference(sliding, autocast):
    config = model_config(sliding=sliding)
    model = randomise(DraftModel(config), scale=0.06).to(DEVICE)
    batch = packed_batch([[300, 84], [200]], 384).to(DEVICE)
    blocks = draw_blocks(batch, config, 24)
    features = normal(2, 384, config.context_size).to(DEVICE)
    embedding = normal(config.vocab_size, config.hidden_size, seed=1).to(DEVICE)
    found = {}
    for kind, loss in (("flex", chunked_loss), ("dense", naive_loss)):
        low = autocast and kind == "flex"
        attention = build_attention(kind, config, 2, 384, 24, DEVICE)
        attention.update(blocks.anchors, blocks.document_start, blocks.keep)
        model.zero_grad()
        table = embedding.bfloat16() if low else embedding
        with torch.autocast("cuda", torch.bfloat16, enabled=low):
            hidden = model(
                features.to(table.dtype),
                table[blocks.noise_ids].flatten(1, 2),
                batch.positions,
                blocks.positions.flatten(1),
                attention,
            )
            slots = hidden.view(2, 24, 16, -1)[:, :, 1:]
            parts = loss(slots, table, blocks.labels, blocks.valid, block_size=16)
        (parts.loss_sum / parts.weight_sum).backward()
        found[kind] = (parts, {name: p.grad.clone() for name, p in model.named_parameters()})
    (ours, gradients), (exact, expected) = found["flex"], found["dense"]
    tolerance = 0.06 if autocast else 2e-3
    assert (ours.loss_sum - exact.loss_sum).abs() / exact.loss_sum < (1e-2 if autocast else 1e-4)
    assert torch.equal(ours.weight_sum, exact.weight_sum)
    for name, gradient in gradients.items():
        assert gradient.dtype == torch.float32
        error = (gradient - expected[name]).norm() / expected[name].norm()
        assert error < tolerance, (name, error)


@pytest.mark.parametrize(("documents", "context", "anchors", "block_size", "window"), SHAPES)
def test_computed_block_mask_equals_the_one_from_the_dense_predicate(documents, context, anchors, block_size, window):
    config = model_config(block_size=block_size)
    rows, queries = len(documents), anchors * block_size
    tiles = TileMask(rows, context, anchors, block_size, window, DEVICE)
    for seed in range(3):
        blocks = draw_blocks(packed_batch(documents, context).to(DEVICE), config, anchors, seed)
        tiles.update(blocks.anchors, blocks.document_start, blocks.keep)
        reference = create_block_mask(
            tiles.block_mask.mask_mod, rows, None, queries, context + queries, device=DEVICE, BLOCK_SIZE=TILE
        )
        for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"):
            assert torch.equal(getattr(tiles.block_mask, name), getattr(reference, name)), name
        for name in ("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices"):
            assert torch.equal(getattr(tiles.block_mask, name), getattr(reference, name)), name


def test_the_step_neither_syncs_nor_recompiles():
    config = model_config(sliding=100)
    model = randomise(DraftModel(config), scale=0.06).to(DEVICE)
    attention = build_attention("flex", config, 2, 384, 24, DEVICE)
    embedding = normal(config.vocab_size, config.hidden_size, seed=1).to(DEVICE).bfloat16()
    batches = [packed_batch([[300, 84], [200]], 384, seed=seed).to(DEVICE) for seed in range(3)]
    batches.append(packed_batch([[384], []], 384, seed=4).to(DEVICE))
    features = normal(2, 384, config.context_size).to(DEVICE).bfloat16()

    def step(batch, seed):
        blocks = sample_blocks(
            batch,
            anchors=24,
            block_size=16,
            mask_token_id=config.mask_token_id,
            generator=torch.Generator().manual_seed(seed),
        )
        attention.update(blocks.anchors, blocks.document_start, blocks.keep)
        with torch.autocast("cuda", torch.bfloat16):
            noise = embedding[blocks.noise_ids].flatten(1, 2)
            hidden = model(features, noise, batch.positions, blocks.positions.flatten(1), attention)
            slots = hidden.view(2, 24, 16, -1)[:, :, 1:]
            parts = chunked_loss(slots, embedding, blocks.labels, blocks.valid, block_size=16, chunk=90)
        parts.loss_sum.backward()
        return parts.loss_sum.detach()

    step(batches[0], 0)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.compiler.set_stance("fail_on_recompile"):
            losses = [step(batch, seed) for seed, batch in enumerate(batches)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert bool(torch.stack(losses).isfinite().all())


def test_cpu_and_gpu_draw_the_same_blocks():
    config = model_config()
    for seed in range(20):
        batch = packed_batch([[300, 84], [200], [], [384]], 384, seed=seed)
        here, there = (draw_blocks(b, config, 64, seed, short_share=0.5) for b in (batch, batch.to(DEVICE)))
        for field in dataclasses.fields(here):
            assert torch.equal(getattr(here, field.name), getattr(there, field.name).cpu()), field.name


def test_flex_inside_a_compiled_model_equals_flex_outside():
    config = model_config(layers=1, layer_types=("sliding_attention",), sliding_window=100)
    model = randomise(DraftModel(config), scale=0.06).to(DEVICE)
    batch = packed_batch([[300, 84]], 384).to(DEVICE)
    blocks = draw_blocks(batch, config, 24)
    attention = build_attention("flex", config, 1, 384, 24, DEVICE)
    attention.update(blocks.anchors, blocks.document_start, blocks.keep)
    arguments = (
        normal(1, 384, config.context_size).to(DEVICE),
        normal(1, 384, config.hidden_size, seed=1).to(DEVICE),
        batch.positions,
        blocks.positions.flatten(1),
        attention,
    )
    whole = torch.compile(model, fullgraph=True, dynamic=False)
    torch.testing.assert_close(whole(*arguments), model(*arguments), atol=2e-3, rtol=2e-3)
    whole(*arguments).sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)


def test_memory_stays_far_below_the_dense_scores():
    config = model_config(layers=1, target_layer_ids=(1,), layer_types=("full_attention",))
    context, anchors = 4096, 256
    queries = anchors * 16
    batch = packed_batch([[context]], context, supervised=1.0).to(DEVICE)
    blocks = draw_blocks(batch, config, anchors)
    attention = build_attention("flex", config, 1, context, anchors, DEVICE)
    q = normal(1, 8, queries, 64).to(DEVICE, torch.bfloat16).requires_grad_()
    k, v = (normal(1, 2, context + queries, 64, seed=s).to(DEVICE, torch.bfloat16).requires_grad_() for s in (1, 2))
    attention.update(blocks.anchors, blocks.document_start, blocks.keep)
    attention(0, q, k, v).sum().backward()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attention.update(blocks.anchors, blocks.document_start, blocks.keep)
    attention(0, q, k, v).sum().backward()
    dense_scores = 8 * queries * (context + queries) * 4
    assert torch.cuda.max_memory_allocated() - before < dense_scores / 10


def test_switching_compilation_off_is_an_error():
    x = torch.randn(1, 2, 128, 64, device=DEVICE)
    with torch.compiler.set_stance("force_eager"), pytest.raises(CompilationError, match="uncompiled"):
        compiled_flex_attention()(x, x, x, None)


def test_a_target_with_transformers_flex_attention_is_compiled_and_reads_the_same_features(tmp_path):
    from slipstream import compilation
    from slipstream.config import TargetConfig
    from slipstream.target.features import FeatureReader
    from slipstream.target.model import load_target
    from support.tiny import save_tiny_target

    compilation.install()  # from here on, an uncompiled call is an error
    save_tiny_target(tmp_path / "target", "llama", hidden_size=256, head_dim=64)
    batch = packed_batch(([100, 28], [128]), 128)
    features = {}
    for attention in ("sdpa", "flex_attention"):
        config = TargetConfig(path=str(tmp_path / "target"), attention=attention, dtype="float32")
        target = load_target(config, device=DEVICE)
        assert target.model.config._attn_implementation == attention
        features[attention] = FeatureReader(target, (1, 3, 6), "unpacked").read(batch).features
    torch.testing.assert_close(features["flex_attention"], features["sdpa"], atol=2e-3, rtol=2e-3)
