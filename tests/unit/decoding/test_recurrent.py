"""Two ways to roll recurrent layers back, equal to each other; the quick one has to prove itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from slipstream.decoding import recurrent
from slipstream.decoding.prefill import DecoderCall, prefill
from slipstream.decoding.recurrent import RecurrentStates
from slipstream.decoding.rollback import TargetState
from slipstream.errors import DecodingError
from slipstream.target.model import Target

COUNTS = [1, 6, 3, 2, 5, 4]


def after_a_round(target: Target, prompts: list[list[int]], *, calculate: bool) -> tuple[TargetState, list[Any]]:
    call = DecoderCall(target)
    block = torch.randint(0, 250, (len(prompts), 6), generator=torch.Generator().manual_seed(4))
    with torch.inference_mode():
        state = TargetState(call, prefill(call, prompts, None), 100, short=False, calculate=calculate)
        with state:
            state.verify(block)
            state.commit(COUNTS)
    layers = [layer for layer in state._cache.layers if hasattr(layer, "recurrent_states")]
    return state, [(layer.conv_states[0].clone(), layer.recurrent_states[0].clone()) for layer in layers]


def test_calculated_and_replayed_states_are_equal(target_of: Callable[[str], Target], prompts: list[list[int]]) -> None:
    calculated, mine = after_a_round(target_of("qwen3_5"), prompts, calculate=True)
    _, its = after_a_round(target_of("qwen3_5"), prompts, calculate=False)
    assert calculated._recurrent.calculate
    assert len(mine) == 6
    for a, b in zip(mine, its, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_a_calculation_that_is_wrong_is_found_out_and_said(
    target_of: Callable[[str], Target],
    prompts: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    right = recurrent.advance_layers

    def wrong(*args: Any) -> Any:
        conv, states = right(*args)
        return conv, [*states[:-1], states[-1] * 1.05]

    monkeypatch.setattr(recurrent, "advance_layers", wrong)
    state, mine = after_a_round(target_of("qwen3_5"), prompts, calculate=True)
    assert not state._recurrent.calculate
    assert "running their modules again: the calculated states differ from theirs by 0.05" in capsys.readouterr().err
    _, its = after_a_round(target_of("qwen3_5"), prompts, calculate=False)
    for a, b in zip(mine, its, strict=True):
        torch.testing.assert_close(a, b, atol=0, rtol=0)


def test_rows_that_kept_everything_are_not_touched(
    target_of: Callable[[str], Target], prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any) -> Any:
        raise AssertionError("nothing was rejected")

    monkeypatch.setattr(recurrent, "advance_layers", never)
    call = DecoderCall(target_of("qwen3_5"))
    with torch.inference_mode(), TargetState(call, prefill(call, prompts, None), 100, short=False) as state:
        state.verify(torch.ones(len(prompts), 6, dtype=torch.long))
        state.commit([6, 6, 6, 0, 6, 6])


def test_a_cache_layer_without_the_known_state_is_refused() -> None:
    class Cache:
        layers = (object(),)

    with pytest.raises(DecodingError, match=r"layer 0.*without conv_states"):
        RecurrentStates(Cache(), [0])


def test_a_recurrent_layer_whose_module_never_gets_the_cache_is_refused(target_of: Callable[[str], Target]) -> None:
    call = DecoderCall(target_of("qwen3_5"))
    state = TargetState(call, prefill(call, [[1, 2, 3]], None), 40, short=False)
    with torch.inference_mode(), state:
        state.verify(torch.ones(1, 4, dtype=torch.long))
        state._recurrent._calls.clear()
        with pytest.raises(DecodingError, match="no module in it is called with the cache"):
            state.commit([2])


@pytest.mark.parametrize("on_cpu", [True, False])
def test_pytorchs_rule_is_told_the_length_of_a_block_and_flas_is_not(
    target_of: Callable[[str], Target], prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch, on_cpu: bool
) -> None:
    """On a CPU PyTorch's runs, whether FLA can be imported or not."""
    monkeypatch.setattr(recurrent, "_fla_is_found", lambda: True)
    if not on_cpu:
        monkeypatch.setattr(recurrent, "kernels_run_on", lambda _: True)
    state, _ = after_a_round(target_of("qwen3_5"), prompts, calculate=True)
    calls = state._recurrent._calls.values()
    assert len(calls) == 6
    assert {call.kwargs.get("chunk_size") for call in calls} == {6 if on_cpu else None}
