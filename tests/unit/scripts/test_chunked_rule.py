"""The training forms of the gated delta rule and the convolution equal transformers' own, values and gradients."""

from __future__ import annotations

import pytest
import torch

from support.scripts import load

rule = load("chunked_rule")
chunked_gated_delta_rule, shifted_conv, unit_lower_inverse = (
    rule.chunked_gated_delta_rule, rule.shifted_conv, rule.unit_lower_inverse
)  # fmt: skip
modeling = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")


def leaves(seed: int, *, alike: float) -> list[torch.Tensor]:
    """Keys that are ``alike`` make a system whose inverse has large terms."""
    draw = torch.Generator().manual_seed(seed)
    batch, length, keys, values, width = 2, 192, 2, 4, 32

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw)

    made = [
        normal(batch, length, keys, width),
        alike * normal(1, 1, keys, width) + normal(batch, length, keys, width),
        normal(batch, length, values, width),
        -torch.rand(batch, length, values, generator=draw) * 0.5,
        torch.rand(batch, length, values, generator=draw),
    ]
    return [x.requires_grad_() for x in made]


@pytest.mark.parametrize("alike", [0.0, 3.0])
def test_the_rule_equals_transformers(alike: float) -> None:
    results = []
    for one in (chunked_gated_delta_rule, modeling.torch_chunk_gated_delta_rule):
        q, k, v, g, beta = given = leaves(0, alike=alike)
        out, _ = one(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)
        (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
        results.append([out.detach(), *(x.grad for x in given)])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-6 * float(theirs.abs().max()), rtol=2e-5)


def test_the_inverse() -> None:
    below = torch.rand(3, 64, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64).tril(-1)
    inverse = unit_lower_inverse(below)
    eye = torch.eye(64, dtype=torch.float64)
    torch.testing.assert_close(inverse @ (eye + below), eye.expand(3, 64, 64), atol=1e-6, rtol=0)


def test_what_only_decoding_needs_is_refused() -> None:
    q, k, v, g, beta = leaves(0, alike=0.0)
    with pytest.raises(ValueError, match="whole chunks"):
        chunked_gated_delta_rule(q[:, :100], k[:, :100], v[:, :100], g[:, :100], beta[:, :100])
    with pytest.raises(ValueError, match="whole chunks"):
        chunked_gated_delta_rule(q, k, v, g, beta, output_final_state=True)


def test_the_convolution() -> None:
    draw = torch.Generator().manual_seed(0)
    x, weight = torch.randn(2, 6, 11, generator=draw), torch.randn(6, 4, generator=draw)
    expected = torch.nn.functional.conv1d(x, weight[:, None], groups=6, padding=3)[..., :11]
    torch.testing.assert_close(shifted_conv(x, weight), expected)
    torch.testing.assert_close(shifted_conv(x, weight, activation="silu"), torch.nn.functional.silu(expected))
