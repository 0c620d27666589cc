"""A short block gives the module's own output, and its pieces the state after any number of tokens."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.decoding.delta_rule import advance
from slipstream.decoding.prefill import DecoderCall, prefill
from slipstream.decoding.short_block import (
    Pieces,
    ShortBlock,
    advance_blocks,
    solve_unit_lower,
    suits_short_block,
)
from slipstream.target.model import Target


def prepared(target: Target, rows: int) -> tuple[Any, Any, Tensor, Tensor]:
    """Return a Gated DeltaNet, the cache of a batch after its prompts, and the layer's two states."""
    generator = torch.Generator().manual_seed(2)
    prompts = torch.randint(0, 250, (rows, 11), generator=generator).tolist()
    cache = prefill(DecoderCall(target), prompts, None).cache
    module = target.parts.layers[1].linear_attn
    layer = cache.layers[1]
    return module, cache, layer.conv_states[0], layer.recurrent_states[0]


def hidden_of(rows: int, length: int) -> Tensor:
    return torch.randn(rows, length, 64, generator=torch.Generator().manual_seed(length))


def run_module(module: Any, cache: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return output and states of the module's own forward on a copy of the cache."""
    cache = copy.deepcopy(cache)
    output = module(hidden_states=hidden, cache=cache, attention_mask=None)
    return output, cache.layers[1].conv_states[0], cache.layers[1].recurrent_states[0]


@pytest.mark.parametrize("length", [1, 2, 5, 16])
@pytest.mark.parametrize("rows", [1, 3])
@torch.inference_mode()
def test_it_equals_the_modules_own_forward(rows: int, length: int, target_of: Callable[[str], Target]) -> None:
    module, cache, conv, state = prepared(target_of("qwen3_5"), rows)
    before = conv.clone(), state.clone()
    hidden = hidden_of(rows, length)
    output, pieces = ShortBlock(module).forward(hidden, conv, state)
    torch.testing.assert_close((conv, state), before, atol=0, rtol=0)
    its, its_conv, its_state = run_module(module, cache, hidden)
    torch.testing.assert_close(output, its, atol=1e-4, rtol=1e-4)
    mine = state.clone()
    (mine_conv,) = advance_blocks([pieces], [mine], [length] * rows)
    torch.testing.assert_close(mine_conv, its_conv, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(mine, its_state, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("counts", [(3, 3, 3), (1, 1, 1), (2, 0, 5), (5, 1, 3), (0, 0, 1)])
@torch.inference_mode()
def test_every_count_gives_the_state_of_the_kept_tokens_alone(
    counts: Sequence[int], target_of: Callable[[str], Target]
) -> None:
    module, cache, conv, state = prepared(target_of("qwen3_5"), 3)
    hidden = hidden_of(3, 5)
    _, pieces = ShortBlock(module).forward(hidden, conv, state)
    mine = state.clone()
    (mine_conv,) = advance_blocks([pieces], [mine], counts)
    for row, count in enumerate(counts):
        if count == 0:
            torch.testing.assert_close((mine_conv[row], mine[row]), (conv[row], state[row]), atol=0, rtol=0)
            continue
        _, its_conv, its_state = run_module(module, cache, hidden[:, :count])
        torch.testing.assert_close(mine_conv[row], its_conv[row], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(mine[row], its_state[row], atol=1e-5, rtol=1e-4)


@torch.inference_mode()
def test_layers_advance_together_as_the_delta_rule_says(target_of: Callable[[str], Target]) -> None:
    """Parity with the calculation that the other devices use, on its own inputs."""
    module, _, conv, state = prepared(target_of("qwen3_5"), 2)
    hidden, counts = hidden_of(2, 4), [3, 1]
    _, pieces = ShortBlock(module).forward(hidden, conv, state)
    states = [state.clone(), 2 * state]
    advance_blocks([pieces, pieces], states, counts)
    out = sum(
        module.conv1d.weight[:, 0, w] * pieces.inputs[:, 1 + w : 5 + w] for w in range(module.conv1d.weight.shape[-1])
    )
    _, key, value = torch.nn.functional.silu(out).split([module.key_dim, module.key_dim, module.value_dim], dim=-1)
    rate = module.in_proj_b(hidden).sigmoid()
    decay = -module.A_log.exp() * torch.nn.functional.softplus(module.in_proj_a(hidden) + module.dt_bias)
    key, value = key.unflatten(-1, (-1, module.head_k_dim)), value.unflatten(-1, (-1, module.head_v_dim))
    expected = advance(state, key, value, decay, rate, torch.tensor(counts))
    torch.testing.assert_close(states[0], expected, atol=1e-5, rtol=1e-4)
    assert (states[1] - states[0]).abs().max() > 1e-3, "the second layer has another state"


@torch.inference_mode()
def test_very_strong_decays_stay_finite(target_of: Callable[[str], Target]) -> None:
    module, _, conv, state = prepared(target_of("qwen3_5"), 1)
    module = copy.deepcopy(module)
    module.A_log.fill_(5.0)
    module.dt_bias.fill_(8.0)
    output, pieces = ShortBlock(module).forward(hidden_of(1, 16), conv, state)
    assert float(pieces.decays.min()) < -1000
    for counts in ([16], [3]):
        mine = state.clone()
        advance_blocks([pieces], [mine], counts)
        assert bool(torch.isfinite(mine).all())
    assert bool(torch.isfinite(output).all())


def test_ragged_counts_of_strong_decays_stay_finite() -> None:
    decays = torch.tensor([-500.0, -1000.0, -1500.0]).expand(2, 4, 3)
    pieces = Pieces(torch.zeros(2, 7, 8), torch.ones(2, 2, 3, 5), torch.ones(2, 4, 3, 6), decays)
    state = torch.ones(2, 4, 5, 6)
    advance_blocks([pieces], [state], [1, 3])
    assert bool(torch.isfinite(state).all())


def test_what_does_not_suit_is_told(target_of: Callable[[str], Target]) -> None:
    module = target_of("qwen3_5").parts.layers[1].linear_attn
    assert suits_short_block(module)
    assert not suits_short_block(target_of("qwen3_5").parts.layers[3].self_attn)
    assert not suits_short_block(copy.deepcopy(module).bfloat16())
    assert not suits_short_block(copy.deepcopy(module).to("meta"))
    other = copy.deepcopy(module)
    other.in_proj_a.bias = torch.nn.Parameter(torch.zeros(other.num_v_heads))
    assert not suits_short_block(other)
    other = copy.deepcopy(module)
    del other.in_proj_z
    assert not suits_short_block(other)
    other = copy.deepcopy(module)
    other.norm = torch.nn.LayerNorm(other.head_v_dim)
    assert not suits_short_block(other)


@pytest.mark.parametrize("length", [2, 3, 4, 7, 8, 16, 17])
@pytest.mark.parametrize("systems", [1, 40])
def test_many_small_systems_are_solved_as_one_is(systems: int, length: int) -> None:
    """What stands on the diagonal and above it is not read, by either way."""
    generator = torch.Generator().manual_seed(length)
    keys = torch.nn.functional.normalize(torch.randn(systems, length, 8, generator=generator), dim=-1)
    system = keys @ keys.transpose(-1, -2) + torch.full((length, length), 7.0).triu()
    right = torch.randn(systems, length, 5, generator=generator)
    below = system.tril(-1).double() + torch.eye(length, dtype=torch.float64)
    expected = torch.linalg.solve(below, right.double()).float()
    torch.testing.assert_close(solve_unit_lower(system, right), expected, atol=2e-4, rtol=1e-4)


def test_keys_that_are_all_alike_are_the_worst_case_and_still_solved() -> None:
    for length in (8, 16):
        right = torch.randn(40, length, 5, generator=torch.Generator().manual_seed(0))
        below = torch.ones(length, length).tril().double().expand(40, -1, -1)
        expected = torch.linalg.solve(below, right.double()).float()
        found = solve_unit_lower(torch.ones(40, length, length), right)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
