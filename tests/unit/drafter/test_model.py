from __future__ import annotations

import pytest
import torch

from slipstream.drafter.attention import build_attention
from slipstream.drafter.config import FULL, SLIDING
from slipstream.drafter.loss import chunked_loss
from slipstream.drafter.model import DraftModel, RMSNorm, rotary_tables, rotate
from slipstream.errors import DrafterError
from support.drafting import draw_blocks, normal, packed_batch, randomise, tiny_drafter_config

ROWS, LENGTH, ANCHORS = 2, 40, 7
DOCUMENTS = ([14, 26], [18, 9, 6])


class Case:
    """A tiny drafter and one micro-batch in the training layout."""

    def __init__(self, **changes):
        self.config = tiny_drafter_config(**changes)
        self.model = randomise(DraftModel(self.config))
        self.batch = packed_batch(DOCUMENTS, LENGTH)
        self.blocks = draw_blocks(self.batch, self.config, ANCHORS)
        self.features = normal(ROWS, LENGTH, self.config.context_size)
        self.embedding = normal(self.config.vocab_size, self.config.hidden_size, seed=1)
        self.noise = self.embedding[self.blocks.noise_ids].flatten(1, 2)
        self.attention = build_attention("dense", self.config, ROWS, LENGTH, ANCHORS, "cpu")
        self.attention.update(self.blocks.anchors, self.blocks.document_start, self.blocks.keep)

    def hidden(self, *, model=None, features=None, noise=None):
        return (self.model if model is None else model)(
            self.features if features is None else features,
            self.noise if noise is None else noise,
            self.batch.positions,
            self.blocks.positions.flatten(1),
            self.attention,
        )

    def loss(self, hidden, head=None):
        slots = hidden.view(ROWS, ANCHORS, self.config.block_size, -1)[:, :, 1:]
        head = self.embedding if head is None else head
        return chunked_loss(slots, head, self.blocks.labels, self.blocks.valid, block_size=self.config.block_size)


@pytest.mark.parametrize("taps", [1, 2, 5])
def test_state_dict_has_exactly_the_published_keys_and_shapes(taps):
    config = tiny_drafter_config(target_layer_ids=tuple(range(taps)), heads=6, kv_heads=2, head_dim=8)
    hidden, inner, d = 32, 48, 8
    expected = {"fc.weight": (hidden, taps * hidden), "hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    for i in range(config.layers):
        expected |= {
            f"layers.{i}.input_layernorm.weight": (hidden,),
            f"layers.{i}.post_attention_layernorm.weight": (hidden,),
            f"layers.{i}.self_attn.q_proj.weight": (6 * d, hidden),
            f"layers.{i}.self_attn.k_proj.weight": (2 * d, hidden),
            f"layers.{i}.self_attn.v_proj.weight": (2 * d, hidden),
            f"layers.{i}.self_attn.o_proj.weight": (hidden, 6 * d),
            f"layers.{i}.self_attn.q_norm.weight": (d,),
            f"layers.{i}.self_attn.k_norm.weight": (d,),
            f"layers.{i}.mlp.gate_proj.weight": (inner, hidden),
            f"layers.{i}.mlp.up_proj.weight": (inner, hidden),
            f"layers.{i}.mlp.down_proj.weight": (hidden, inner),
        }
    model = DraftModel(config)
    assert {key: tuple(value.shape) for key, value in model.state_dict().items()} == expected
    assert len(expected) == 11 * config.layers + 3
    assert not list(model.buffers())


def test_attention_biases_are_there_only_when_asked_for():
    keys = DraftModel(tiny_drafter_config(attention_bias=True)).state_dict()
    assert len(keys) == 15 * 2 + 3
    assert not keys["layers.1.self_attn.o_proj.bias"].any()


def test_first_weights_follow_the_generator_and_leave_the_global_one_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    config = tiny_drafter_config(hidden_size=64)
    one, two = DraftModel(config), DraftModel(config)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    two.init_weights(0.05, torch.Generator().manual_seed(3))
    for name, parameter in two.named_parameters():
        if parameter.dim() >= 2:
            assert parameter.std().item() == pytest.approx(0.05, rel=0.15), name
            assert not torch.equal(parameter, one.get_parameter(name))
        else:
            assert bool((parameter == 1).all())


@pytest.mark.parametrize("sliding", [0, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_layout_equals_decoding_one_block_at_a_time(sliding, dtype):
    case = Case(sliding=sliding)
    model = case.model.to(dtype)
    features, noise = case.features.to(dtype), case.noise.to(dtype)
    hidden = case.hidden(features=features, noise=noise).view(ROWS, ANCHORS, case.config.block_size, -1)
    noise = noise.view_as(hidden)
    tolerance = 1e-5 if dtype == torch.float32 else 0.1
    compared = 0
    for row in range(ROWS):
        for n in range(ANCHORS):
            if not case.blocks.keep[row, n]:
                continue
            span = slice(int(case.blocks.document_start[row, n]), int(case.blocks.anchors[row, n]))
            positions = case.batch.positions[row : row + 1, span]
            kv = model.context_kv(features[row : row + 1, span], positions)
            out = model.draft(
                noise[row : row + 1, n], case.blocks.positions[row : row + 1, n], kv, context_positions=positions
            )
            torch.testing.assert_close(out[0], hidden[row, n], atol=tolerance, rtol=tolerance)
            compared += 1
    assert compared > 8


@pytest.mark.parametrize("sliding", [0, 6])
@pytest.mark.parametrize("left", [True, False])
def test_decoding_ragged_rows_with_a_mask_equals_each_row_alone(sliding, left):
    config = tiny_drafter_config(sliding=sliding)
    model = randomise(DraftModel(config))
    lengths, widest = [9, 3, 14], 14
    noise = normal(3, config.block_size, config.hidden_size, seed=2)
    features = normal(3, widest, config.context_size, seed=3)
    offsets = [widest - n if left else 0 for n in lengths]
    mask = torch.zeros(3, 1, 1, widest, dtype=torch.bool)
    positions = torch.zeros(3, widest, dtype=torch.int64)
    for row, (n, at) in enumerate(zip(lengths, offsets, strict=True)):
        mask[row, :, :, at : at + n] = True
        positions[row, at : at + n] = torch.arange(n)
    block = torch.tensor(lengths)[:, None] + torch.arange(config.block_size)
    together = model.draft(
        noise, block, model.context_kv(features, positions), context_mask=mask, context_positions=positions
    )
    for row, (n, at) in enumerate(zip(lengths, offsets, strict=True)):
        own = positions[row : row + 1, at : at + n]
        kv = model.context_kv(features[row : row + 1, at : at + n], own)
        alone = model.draft(noise[row : row + 1], block[row : row + 1], kv, context_positions=own)
        torch.testing.assert_close(together[row], alone[0], atol=1e-5, rtol=1e-5)


def test_context_kv_may_grow_token_by_token():
    config = tiny_drafter_config()
    model = randomise(DraftModel(config))
    features, positions = normal(1, 9, config.context_size), torch.arange(9)[None]
    whole = model.context_kv(features, positions)
    parts = [model.context_kv(features[:, a:b], positions[:, a:b]) for a, b in ((0, 4), (4, 5), (5, 9))]
    for layer, (k, v) in enumerate(whole):
        torch.testing.assert_close(torch.cat([p[layer][0] for p in parts], 2), k, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(torch.cat([p[layer][1] for p in parts], 2), v, atol=1e-6, rtol=1e-5)


def test_a_block_may_have_no_context_at_all():
    config = tiny_drafter_config()
    model = randomise(DraftModel(config))
    empty = model.context_kv(normal(1, 0, config.context_size), torch.zeros(1, 0, dtype=torch.int64))
    out = model.draft(normal(1, 4, config.hidden_size), torch.arange(4)[None], empty)
    assert bool(out.isfinite().all())


def test_sliding_layers_need_context_positions():
    config = tiny_drafter_config(sliding=4)
    model = DraftModel(config)
    kv = model.context_kv(normal(1, 3, config.context_size), torch.arange(3)[None])
    with pytest.raises(DrafterError, match="context_positions"):
        model.draft(normal(1, 4, config.hidden_size), torch.arange(3, 7)[None], kv)


@pytest.mark.parametrize("sliding", [0, 6])
def test_no_leak_from_the_anchor_on_or_from_another_document(sliding):
    case = Case(sliding=sliding)
    shape = (ROWS, ANCHORS, case.config.block_size, case.config.hidden_size)
    before = case.hidden().view(shape)
    seen = 0
    for row in range(ROWS):
        for n in range(ANCHORS):
            if not case.blocks.keep[row, n]:
                continue
            start, anchor = int(case.blocks.document_start[row, n]), int(case.blocks.anchors[row, n])
            changed = case.features.clone()
            changed[row, anchor:] += 3.0
            changed[row, :start] -= 5.0
            assert torch.equal(case.hidden(features=changed).view(shape)[row, n], before[row, n])
            if anchor > start:
                changed = case.features.clone()
                changed[row, anchor - 1] += 3.0
                assert not torch.equal(case.hidden(features=changed).view(shape)[row, n], before[row, n])
                seen += 1
            noise = case.noise.view(shape).clone()
            noise[row, torch.arange(ANCHORS) != n] += 1.0
            assert torch.equal(case.hidden(noise=noise.flatten(1, 2)).view(shape)[row, n], before[row, n])
    assert seen > 8


def test_packed_documents_draft_as_they_do_alone():
    config = tiny_drafter_config(sliding=6)
    model = randomise(DraftModel(config))
    batch = packed_batch([[14, 26]], LENGTH)
    blocks = draw_blocks(batch, config, 12)
    features = normal(1, LENGTH, config.context_size)
    noise = normal(1, 12 * config.block_size, config.hidden_size, seed=4)
    attention = build_attention("dense", config, 1, LENGTH, 12, "cpu")
    attention.update(blocks.anchors, blocks.document_start, blocks.keep)
    packed = model(features, noise, batch.positions, blocks.positions.flatten(1), attention)
    second = (blocks.document_start[0] == 14) & blocks.keep[0]
    assert 0 < int(second.sum()) < 12
    attention = build_attention("dense", config, 1, 26, int(second.sum()), "cpu")
    attention.update(blocks.anchors[:, second] - 14, blocks.document_start[:, second] - 14, blocks.keep[:, second])
    pick = second.repeat_interleave(config.block_size)
    alone = model(
        features[:, 14:], noise[:, pick], batch.positions[:, 14:], blocks.positions[:, second].flatten(1), attention
    )
    torch.testing.assert_close(packed[:, pick], alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("sliding", [0, 6])
def test_gradients_reach_every_parameter_in_float32(autocast, sliding):
    case = Case(sliding=sliding)
    head = case.embedding.bfloat16() if autocast else case.embedding
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        noise = case.noise.bfloat16() if autocast else case.noise
        hidden = case.hidden(noise=noise)
        parts = case.loss(hidden, head)
    assert hidden.dtype == (torch.bfloat16 if autocast else torch.float32)
    parts.loss_sum.backward()
    for name, parameter in case.model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.dtype == torch.float32
        assert bool(parameter.grad.isfinite().all()), name
        assert bool(parameter.grad.abs().sum() > 0), name


def test_autocast_computes_about_the_same_as_float32():
    case = Case()
    exact = case.hidden()
    with torch.autocast("cpu", torch.bfloat16):
        rough = case.hidden(features=case.features.bfloat16(), noise=case.noise.bfloat16())
    assert rough.dtype == torch.bfloat16
    torch.testing.assert_close(rough.float(), exact, atol=0.25, rtol=0.1)
    assert (rough.float() - exact).pow(2).mean().sqrt() < 0.05 * exact.pow(2).mean().sqrt()


def test_a_row_without_any_block_is_finite_and_gives_zero_gradients():
    case = Case()
    none = torch.zeros_like(case.blocks.keep)
    case.attention.update(case.blocks.anchors, case.blocks.document_start, none)
    hidden = case.hidden()
    parts = chunked_loss(
        hidden.view(ROWS, ANCHORS, 4, -1)[:, :, 1:],
        case.embedding,
        case.blocks.labels,
        torch.zeros_like(case.blocks.valid),
        block_size=4,
    )
    parts.loss_sum.backward()
    assert bool(hidden.isfinite().all())
    assert parts.loss_sum.item() == 0.0
    assert parts.weight_sum.item() == 0.0
    assert all(p.grad is not None and not p.grad.any() for p in case.model.parameters())


def test_rotary_frequencies_survive_a_cast_of_the_module():
    config = tiny_drafter_config(rope_theta=1e6, head_dim=64)
    model = DraftModel(config)
    positions = torch.tensor([[0, 1, 777, 40000]])
    before = model._tables(positions)
    cast = model.to(torch.bfloat16)._tables(positions)
    assert before[0].dtype == cast[0].dtype == torch.float32
    assert torch.equal(before[0], cast[0])
    assert torch.equal(before[1], cast[1])
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model._tables(positions)[0], before[0])
    exact = torch.arange(0, 64, 2, dtype=torch.float64).div(64).mul(-torch.tensor(1e6).double().log()).exp()
    angles = positions.double()[:, None, :, None] * exact
    torch.testing.assert_close(before[0].double(), angles.cos(), atol=6e-3, rtol=0)


def test_rotary_depends_on_distance_alone_and_covers_the_whole_head():
    q, k = normal(1, 1, 1, 16), normal(1, 1, 1, 16, seed=1)

    def score(p, j):
        at = [rotary_tables(torch.tensor([[i]]), 16, 10000.0) for i in (p, j)]
        return (rotate(q, at[0]) * rotate(k, at[1])).sum().item()

    assert score(9, 4) == pytest.approx(score(105, 100), abs=1e-4)
    assert score(9, 4) != pytest.approx(score(9, 5), abs=1e-3)
    moved = rotate(q, rotary_tables(torch.tensor([[3]]), 16, 10000.0)) != q
    assert bool(moved.all())


def test_norm_is_computed_in_float32_and_keeps_the_dtype():
    norm = RMSNorm(8, 1e-6)
    x = (normal(3, 8) * 1e4).bfloat16()
    expected = torch.nn.functional.rms_norm(x.float(), (8,), eps=1e-6).bfloat16()
    assert norm(x).dtype == torch.bfloat16
    assert torch.equal(norm(x), expected)


@pytest.mark.parametrize("autocast", [False, True])
def test_the_training_forward_traces_as_one_graph(autocast):
    case = Case(sliding=6)
    torch._dynamo.reset()
    step = torch.compile(case.model, fullgraph=True, dynamic=False, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        traced, eager = case.hidden(model=step), case.hidden()
    torch.testing.assert_close(traced, eager, atol=0.05 if autocast else 1e-5, rtol=1e-2 if autocast else 1e-5)
    traced.sum().backward()
    assert case.model.fc.weight.grad is not None


def test_layer_types_choose_the_mask_of_each_layer():
    one, other = (
        Case(layer_types=(SLIDING, FULL), sliding_window=3),
        Case(layer_types=(FULL, SLIDING), sliding_window=3),
    )
    assert not torch.allclose(one.hidden(), other.hidden())
