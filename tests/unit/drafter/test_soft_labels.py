"""Soft labels: the target's distribution in place of the data's token."""

from __future__ import annotations

import dataclasses
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.drafter.anchors import label_sources, sample_blocks
from slipstream.drafter.loss import LossParts, SoftLabels, chunked_loss, decay_weights, naive_loss
from support.drafting import draw_blocks, normal, packed_batch, tiny_drafter_config

BLOCKS, BLOCK, HIDDEN, VOCAB, TOKENS = 11, 5, 24, 97, 30
SLOTS = BLOCKS * (BLOCK - 1)


def case(dtype=torch.float32, seed=0, share=1.0, valid_share=0.7):
    draw = torch.Generator().manual_seed(seed)
    hidden = normal(SLOTS, HIDDEN, seed=seed).to(dtype)
    head = normal(VOCAB, HIDDEN, seed=seed + 1, scale=0.5).to(dtype)
    labels = torch.randint(0, VOCAB, (BLOCKS, BLOCK - 1), generator=draw)
    valid = torch.rand(BLOCKS, BLOCK - 1, generator=draw) < valid_share
    soft = SoftLabels(
        states=normal(TOKENS, HIDDEN, seed=seed + 2).to(dtype),
        source=torch.randint(0, TOKENS, (BLOCKS, BLOCK - 1), generator=draw),
        head=lambda states: F.linear(states, head),
        share=share,
    )
    return (hidden, head, labels, valid), soft


def run(loss, inputs, **settings) -> tuple[LossParts, torch.Tensor]:
    hidden, *rest = inputs
    leaf = hidden.detach().clone().requires_grad_()
    parts = loss(leaf, *rest, block_size=BLOCK, **settings)
    (parts.loss_sum * 0.37).backward()
    return parts, leaf.grad


@pytest.mark.parametrize("chunk", [0, 1, 9, 12, 10_000])
@pytest.mark.parametrize("weighting", ["decay", "dpace"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("share", [1.0, 0.3])
def test_chunked_equals_naive_in_values_and_gradients(chunk, weighting, dtype, share):
    inputs, soft = case(dtype, share=share)
    settings = {"weighting": weighting, "gamma": 3.0, "alpha": 0.4, "soft": soft}
    expected, expected_gradient = run(naive_loss, inputs, **settings)
    parts, gradient = run(chunked_loss, inputs, **settings, chunk=chunk)
    for name in ("loss_sum", "weight_sum", "hard_sum", "nll"):
        torch.testing.assert_close(getattr(parts, name), getattr(expected, name), atol=2e-5, rtol=1e-5)
    assert torch.equal(parts.argmax, expected.argmax)
    assert gradient.dtype == dtype
    loose = {"atol": 1e-6, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 5e-3, "rtol": 2e-2}
    torch.testing.assert_close(gradient, expected_gradient, **loose)


@pytest.mark.parametrize("share", [1.0, 0.3])
def test_loss_and_gradient_are_those_of_the_formula(share):
    (hidden, head, labels, valid), soft = case(share=share)
    parts, gradient = run(chunked_loss, (hidden, head, labels, valid), soft=soft, gamma=3.0, chunk=8)
    wide = head.double()
    p = torch.softmax(soft.states.double()[soft.source.flatten()] @ wide.T, -1)
    label = share * p + (1 - share) * F.one_hot(labels.flatten(), VOCAB)
    drafted = torch.log_softmax(hidden.double() @ wide.T, -1)
    weight = (decay_weights(BLOCK, 3.0).double() * valid).flatten()
    assert parts.loss_sum.item() == pytest.approx(float(-(weight[:, None] * label * drafted).sum()), rel=1e-5)
    expected = 0.37 * weight[:, None] * (drafted.exp() - label) @ wide
    torch.testing.assert_close(gradient.double(), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("weighting", ["decay", "dpace"])
@pytest.mark.parametrize("loss", [naive_loss, chunked_loss])
def test_what_is_reported_of_the_datas_tokens_stays(loss, weighting):
    inputs, soft = case()
    hard, _ = run(loss, inputs, weighting=weighting)
    parts, _ = run(loss, inputs, weighting=weighting, soft=soft)
    for name in ("nll", "argmax", "weight_sum", "hard_sum"):
        assert torch.equal(getattr(parts, name), getattr(hard, name)), name
    assert torch.equal(hard.hard_sum, hard.loss_sum)
    assert not torch.equal(parts.loss_sum, hard.loss_sum)


@pytest.mark.parametrize("loss", [naive_loss, chunked_loss])
def test_a_target_that_is_sure_of_the_datas_tokens_gives_the_hard_loss(loss):
    inputs, soft = case()
    labels = inputs[2].flatten()
    sure = dataclasses.replace(
        soft,
        states=labels[:, None].float(),
        source=torch.arange(SLOTS),
        head=lambda states: 1e4 * F.one_hot(states[:, 0].long(), VOCAB).float(),
    )
    hard, hard_gradient = run(loss, inputs)
    parts, gradient = run(loss, inputs, soft=sure)
    torch.testing.assert_close(parts.loss_sum, hard.loss_sum)
    torch.testing.assert_close(gradient, hard_gradient, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("loss", [naive_loss, chunked_loss])
def test_a_drafter_that_has_the_targets_logits_is_done(loss):
    (_, head, labels, valid), soft = case()
    parts, gradient = run(loss, (soft.states[soft.source.flatten()], head, labels, valid), soft=soft)
    p = torch.softmax(F.linear(soft.states, head), -1)
    entropy = -(p * p.log()).sum(-1)[soft.source]
    torch.testing.assert_close(parts.loss_sum, (decay_weights(BLOCK, 7.0) * valid * entropy).sum())
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), atol=1e-6, rtol=0)


@pytest.mark.parametrize("weighting", ["decay", "dpace"])
@pytest.mark.parametrize("loss", [naive_loss, chunked_loss])
def test_no_valid_slot_gives_zero_and_finite(loss, weighting):
    (hidden, head, labels, valid), soft = case()
    parts, gradient = run(loss, (hidden, head, labels, valid & False), weighting=weighting, soft=soft)
    assert parts.loss_sum.item() == parts.weight_sum.item() == parts.hard_sum.item() == 0.0
    assert bool(parts.nll.isfinite().all())
    assert not gradient.any()


def test_an_invalid_slot_has_no_gradient_and_its_source_does_not_matter():
    inputs, soft = case()
    valid = inputs[3]
    parts, gradient = run(chunked_loss, inputs, soft=soft, chunk=8)
    assert not gradient[~valid.flatten()].any()
    assert bool((gradient[valid.flatten()].abs().sum(-1) > 0).all())
    moved = dataclasses.replace(soft, source=torch.where(valid, soft.source, 0))
    again, gradient_again = run(chunked_loss, inputs, soft=moved, chunk=8)
    assert torch.equal(parts.loss_sum, again.loss_sum)
    assert torch.equal(gradient, gradient_again)


def test_the_targets_logits_are_those_of_its_own_head():
    """Scaled and capped, where the target does so; the drafter's are not."""
    inputs, soft = case()
    capped = dataclasses.replace(soft, head=lambda states: 2 * torch.tanh(soft.head(states) / 2))
    expected, expected_gradient = run(naive_loss, inputs, soft=capped)
    parts, gradient = run(chunked_loss, inputs, soft=capped, chunk=8)
    torch.testing.assert_close(parts.loss_sum, expected.loss_sum)
    torch.testing.assert_close(gradient, expected_gradient, atol=1e-6, rtol=1e-5)
    assert not torch.equal(parts.loss_sum, run(chunked_loss, inputs, soft=soft, chunk=8)[0].loss_sum)


@pytest.mark.parametrize("loss", [naive_loss, chunked_loss])
def test_products_are_in_the_heads_dtype_under_autocast_and_nothing_of_the_target_has_a_gradient(loss):
    inputs, soft = case()
    soft.states.requires_grad_()
    plain, gradient = run(loss, inputs, soft=soft)
    leaf = inputs[0].clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        cast = loss(leaf, *inputs[1:], block_size=BLOCK, soft=soft)
    (cast.loss_sum * 0.37).backward()
    assert torch.equal(plain.loss_sum, cast.loss_sum)
    assert torch.equal(gradient, leaf.grad)
    assert soft.states.grad is None
    assert not cast.hard_sum.requires_grad


def test_without_gradient_the_values_are_the_same():
    inputs, soft = case(share=0.5)
    expected, _ = run(chunked_loss, inputs, soft=soft)
    with torch.no_grad():
        parts = chunked_loss(*inputs, block_size=BLOCK, soft=soft)
    assert not parts.loss_sum.requires_grad
    assert torch.equal(parts.loss_sum, expected.loss_sum)


class Alive(TorchDispatchMode):
    """Notes the most bytes that tensors made inside held at once."""

    now = most = 0

    def __init__(self, *outside: torch.Tensor) -> None:
        super().__init__()
        self.seen = weakref.WeakSet(tensor.untyped_storage() for tensor in outside)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage() not in self.seen:
                self.note(tensor)
        return out

    def note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self.seen.add(storage)
        self.now += storage.nbytes()
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self.gone, storage.nbytes())

    def gone(self, size: int) -> None:
        self.now -= size


@pytest.mark.parametrize("hidden_dtype", [torch.float32, torch.bfloat16])
def test_two_chunks_of_logits_exist_at_once(hidden_dtype):
    vocabulary, blocks = 4000, 64
    _, soft = case()
    draw = torch.randint(0, TOKENS, (blocks * (BLOCK - 1),), generator=torch.Generator().manual_seed(0))
    head = normal(vocabulary, HIDDEN, scale=0.5).to(hidden_dtype)
    hidden = normal(blocks * (BLOCK - 1), HIDDEN).to(hidden_dtype)
    soft = dataclasses.replace(
        soft, states=soft.states.to(hidden_dtype), source=draw, head=lambda states: F.linear(states, head)
    )
    inputs = (hidden, head, draw, torch.ones(blocks, BLOCK - 1, dtype=torch.bool))
    chunk = 64 * vocabulary * 4
    seen = {}
    for name, more in (("hard", {}), ("soft", {"soft": soft})):
        with Alive(*inputs, soft.states) as alive:
            run(chunked_loss, inputs, chunk=64, **more)
        seen[name] = alive.most / chunk
    half = 0.0 if hidden_dtype == torch.float32 else 0.5  # a half head's product, before it is made float32
    assert 1 + half <= seen["hard"] < 1.1 + half
    assert 2 + half <= seen["soft"] < 2.2 + half


def test_a_slots_label_is_predicted_one_token_before_it():
    config = tiny_drafter_config()
    batch = packed_batch([(17, 20), (40,)], 48)
    blocks = draw_blocks(batch, config, anchors=12)
    source = label_sources(blocks, batch.ids.shape[1])
    assert source.shape == blocks.labels.shape
    rows, tokens = batch.ids.shape
    flat = {name: getattr(batch, name).flatten() for name in ("ids", "document_ids", "positions")}
    assert 0 <= int(source.min()) <= int(source.max()) < rows * tokens
    seen = 0
    for row in range(rows):
        for n in range(blocks.anchors.shape[1]):
            for k in range(1, config.block_size):
                if not blocks.valid[row, n, k - 1]:
                    continue
                at = int(source[row, n, k - 1])
                anchor = row * tokens + int(blocks.anchors[row, n])
                assert at == anchor + k - 1
                assert int(flat["ids"][at + 1]) == int(blocks.labels[row, n, k - 1])
                assert int(flat["document_ids"][at]) == int(flat["document_ids"][anchor])
                seen += 1
    assert seen > 20


def test_sources_of_blocks_at_the_rows_end_stay_inside():
    batch = packed_batch([(6,)], 6, supervised=1.1)
    blocks = sample_blocks(
        batch, anchors=9, block_size=8, mask_token_id=319, generator=torch.Generator().manual_seed(0)
    )
    assert int(label_sources(blocks, 6).max()) == 5
