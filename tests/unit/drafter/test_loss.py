from __future__ import annotations

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.drafter.loss import blocks_per_chunk, chunked_loss, decay_weights, dpace_weights, naive_loss
from support.drafting import normal

BLOCKS, BLOCK, HIDDEN, VOCAB = 11, 5, 24, 97


def case(dtype=torch.float32, seed=0, valid_share=0.7):
    draw = torch.Generator().manual_seed(seed)
    hidden = normal(BLOCKS * (BLOCK - 1), HIDDEN, seed=seed).to(dtype).requires_grad_()
    head = normal(VOCAB, HIDDEN, seed=seed + 1, scale=0.5).to(dtype)
    labels = torch.randint(0, VOCAB, (BLOCKS, BLOCK - 1), generator=draw)
    valid = torch.rand(BLOCKS, BLOCK - 1, generator=draw) < valid_share
    return hidden, head, labels, valid


def run(loss, hidden, head, labels, valid, **settings):
    leaf = hidden.detach().clone().requires_grad_()
    parts = loss(leaf, head, labels, valid, block_size=BLOCK, **settings)
    (parts.loss_sum * 0.37).backward()
    return parts, leaf.grad


@pytest.mark.parametrize("chunk", [0, 1, 4, 9, 12, 10_000])
@pytest.mark.parametrize("weighting", ["decay", "dpace"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunked_equals_naive_in_values_and_gradients(chunk, weighting, dtype):
    inputs = case(dtype)
    settings = {"weighting": weighting, "gamma": 3.0, "alpha": 0.4}
    expected, expected_gradient = run(naive_loss, *inputs, **settings)
    parts, gradient = run(chunked_loss, *inputs, **settings, chunk=chunk)
    exact = {"atol": 1e-5, "rtol": 1e-5}
    torch.testing.assert_close(parts.loss_sum, expected.loss_sum, **exact)
    torch.testing.assert_close(parts.weight_sum, expected.weight_sum, **exact)
    torch.testing.assert_close(parts.nll, expected.nll, **exact)
    assert torch.equal(parts.argmax, expected.argmax)
    assert gradient.dtype == dtype
    loose = {"atol": 1e-6, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 5e-3, "rtol": 2e-2}
    torch.testing.assert_close(gradient, expected_gradient, **loose)


def test_gradient_is_that_of_finite_differences():
    hidden, head, labels, valid = case()
    _, gradient = run(chunked_loss, hidden, head, labels, valid, gamma=3.0, chunk=8)
    wide, step = hidden.detach().double(), 1e-5
    for row, column in ((0, 0), (7, 3), (20, 23)):
        values = []
        for sign in (1, -1):
            moved = wide.clone()
            moved[row, column] += sign * step
            nll = torch.nn.functional.cross_entropy(moved @ head.double().T, labels.flatten(), reduction="none")
            weights = decay_weights(BLOCK, 3.0).double() * valid
            values.append((weights.flatten() * nll).sum().item())
        slope = 0.37 * (values[0] - values[1]) / (2 * step)
        assert gradient[row, column].item() == pytest.approx(slope, abs=1e-4)


@pytest.mark.parametrize("weighting", ["decay", "dpace"])
@pytest.mark.parametrize("loss", [naive_loss, chunked_loss])
def test_no_valid_slot_gives_zero_and_finite(loss, weighting):
    hidden, head, labels, valid = case()
    parts, gradient = run(loss, hidden, head, labels, torch.zeros_like(valid), weighting=weighting)
    assert parts.loss_sum.item() == 0.0
    assert parts.weight_sum.item() == 0.0
    assert bool(parts.nll.isfinite().all())
    assert not gradient.any()


def test_an_invalid_slot_has_no_gradient_and_no_weight():
    hidden, head, labels, valid = case()
    parts, gradient = run(chunked_loss, hidden, head, labels, valid, chunk=8)
    assert not gradient[~valid.flatten()].any()
    assert bool((gradient[valid.flatten()].abs().sum(-1) > 0).all())
    other = torch.where(valid, labels, (labels + 1) % VOCAB)
    again, gradient_again = run(chunked_loss, hidden, head, other, valid, chunk=8)
    assert torch.equal(parts.loss_sum, again.loss_sum)
    assert torch.equal(gradient, gradient_again)


def test_the_head_is_frozen():
    hidden, head, labels, valid = case()
    head.requires_grad_()
    parts = chunked_loss(hidden, head, labels, valid, block_size=BLOCK)
    parts.loss_sum.backward()
    assert head.grad is None
    assert not parts.weight_sum.requires_grad
    assert not parts.nll.requires_grad


@pytest.mark.parametrize("loss", [naive_loss, chunked_loss])
def test_the_product_is_in_the_heads_dtype_under_autocast(loss):
    hidden, head, labels, valid = case()
    plain, gradient = run(loss, hidden, head, labels, valid)
    leaf = hidden.detach().clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        cast = loss(leaf, head, labels, valid, block_size=BLOCK)
    (cast.loss_sum * 0.37).backward()
    assert torch.equal(plain.loss_sum, cast.loss_sum)
    assert torch.equal(gradient, leaf.grad)


def test_float32_hidden_with_a_half_head_gets_a_float32_gradient():
    hidden, head, labels, valid = case()
    parts, gradient = run(chunked_loss, hidden, head.bfloat16(), labels, valid, chunk=8)
    expected, expected_gradient = run(naive_loss, hidden, head.bfloat16(), labels, valid)
    assert gradient.dtype == torch.float32
    torch.testing.assert_close(parts.loss_sum, expected.loss_sum)
    torch.testing.assert_close(gradient, expected_gradient, atol=5e-3, rtol=2e-2)


def test_without_gradient_the_values_are_the_same():
    hidden, head, labels, valid = case()
    expected, _ = run(chunked_loss, hidden, head, labels, valid)
    with torch.no_grad():
        parts = chunked_loss(hidden, head, labels, valid, block_size=BLOCK)
    assert not parts.loss_sum.requires_grad
    assert torch.equal(parts.loss_sum, expected.loss_sum)


def test_any_leading_shape_is_taken():
    hidden, head, labels, valid = case()
    flat, gradient = run(chunked_loss, hidden, head, labels, valid)
    leaf = hidden.detach().clone().requires_grad_()
    parts = chunked_loss(leaf.view(1, BLOCKS, BLOCK - 1, HIDDEN), head, labels[None], valid[None], block_size=BLOCK)
    (parts.loss_sum * 0.37).backward()
    assert torch.equal(parts.loss_sum, flat.loss_sum)
    assert torch.equal(leaf.grad, gradient)


class LargestTensor(TorchDispatchMode):
    """Records the most elements that any operation returned."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


def test_full_logits_never_exist():
    hidden, head, labels, valid = case()
    seen = {}
    for name, loss, more in (("naive", naive_loss, {}), ("chunked", chunked_loss, {"chunk": 8})):
        with LargestTensor() as largest:
            run(loss, hidden, head, labels, valid, **more)
        seen[name] = largest.elements
    assert seen["naive"] >= BLOCKS * (BLOCK - 1) * VOCAB
    assert seen["chunked"] <= max(8 * VOCAB, VOCAB * HIDDEN)


def test_chunks_are_whole_blocks():
    head = torch.empty(1000, 2)
    assert blocks_per_chunk(1, 16, head) == 1
    assert blocks_per_chunk(31, 16, head) == 2
    assert blocks_per_chunk(0, 16, head) == 256 * 2**20 // 4000 // 15
    # The softmax is in float32 whatever the head is, so a half head has no more rows.
    assert blocks_per_chunk(0, 16, head.bfloat16()) == 256 * 2**20 // 4000 // 15
    assert blocks_per_chunk(0, 16, torch.empty(2**27, 1, device="meta")) == 1


def test_decay_weights_follow_the_paper():
    weights = decay_weights(16, 7.0)
    assert weights.shape == (15,)
    for k in range(1, 16):
        assert weights[k - 1].item() == pytest.approx(math.exp(-(k - 1) / 7.0), rel=1e-6)


def test_dpace_weights_follow_the_sum_of_products():
    nll = torch.rand(6, 7, generator=torch.Generator().manual_seed(0)) * 4
    valid = torch.rand(6, 7, generator=torch.Generator().manual_seed(1)) < 0.7
    weights = dpace_weights(nll, valid, 0.3)
    for row in range(6):
        for j in range(7):
            expected = 0.0
            for m in range(j, 7):
                if valid[row, m]:
                    product = 1.0
                    for i in range(m + 1):
                        if valid[row, i]:
                            product *= 0.7 * math.exp(-nll[row, i].item()) + 0.3
                    expected += product
            assert weights[row, j].item() == pytest.approx(expected if valid[row, j] else 0.0, rel=1e-5)


def test_dpace_weights_carry_no_gradient():
    nll = torch.rand(2, 3, requires_grad=True)
    assert not dpace_weights(nll, torch.ones(2, 3, dtype=torch.bool), 0.5).requires_grad
