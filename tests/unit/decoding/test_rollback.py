"""After any mix of accepted counts the target's state equals that of the kept tokens alone; crop's does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from slipstream.decoding.prefill import DecoderCall, prefill
from slipstream.decoding.rollback import TargetState
from slipstream.errors import DecodingError
from slipstream.target.model import Target
from support.tiny import FAMILIES

BLOCK = 6
ROUNDS = ([1, 6, 3, 2, 6, 4], [6, 1, 1, 5, 2, 3], [2, 2, 6, 6, 1, 1], [3, 6, 2, 4, 5, 6], [1, 1, 1, 1, 1, 1])


def alone(target: Target, ids: list[int]) -> torch.Tensor:
    """States after the final norm of ``ids``, without cache, padding or batch."""
    with torch.inference_mode():
        return target.parts.decoder(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state[0]


@pytest.mark.parametrize(
    ("family", "short", "calculate"),
    [*((f, True, True) for f in FAMILIES), ("qwen3_5", False, True), ("qwen3_5", False, False)],
)
def test_ragged_rounds_equal_the_kept_tokens_alone(
    family: str, short: bool, calculate: bool, target_of: Callable[[str], Target], prompts: list[list[int]]
) -> None:
    target, call = target_of(family), DecoderCall(target_of(family))
    generator = torch.Generator().manual_seed(3)
    kept = [list(p) for p in prompts]
    with torch.inference_mode():
        capacity = max(map(len, prompts)) + 60
        state = TargetState(call, prefill(call, prompts, None), capacity, short=short, calculate=calculate)
        with state:
            for counts in ROUNDS:
                block = torch.randint(0, 250, (len(prompts), BLOCK), generator=generator)
                hidden = state.verify(block)
                for row, count in enumerate(counts):
                    expected = alone(target, kept[row] + block[row].tolist())[-BLOCK:]
                    torch.testing.assert_close(hidden[row], expected, atol=2e-4, rtol=2e-4)
                    kept[row] += block[row, :count].tolist()
                state.commit(counts)
            assert state.starts == [len(k) for k in kept]
            assert state._recurrent.calculate is calculate
            assert (state._recurrent.short is not None) is (short and family == "qwen3_5")
            state.keep([4, 1])
            block = torch.randint(0, 250, (2, BLOCK), generator=generator)
            hidden = state.verify(block)
            for row, source in enumerate((4, 1)):
                expected = alone(target, kept[source] + block[row].tolist())[-BLOCK:]
                torch.testing.assert_close(hidden[row], expected, atol=2e-4, rtol=2e-4)


def test_prefill_of_a_padded_batch_equals_each_prompt_alone(
    target_of: Callable[[str], Target], prompts: list[list[int]]
) -> None:
    for family in FAMILIES:
        target = target_of(family)
        with torch.inference_mode():
            state = prefill(DecoderCall(target), prompts, (1, 3))
            assert state.features is not None
            for row, prompt in enumerate(prompts):
                single = prefill(DecoderCall(target), [prompt], (1, 3))
                assert single.features is not None
                torch.testing.assert_close(state.logits[row], single.logits[0], atol=2e-4, rtol=2e-4)
                torch.testing.assert_close(state.features[row, : len(prompt)], single.features[0], atol=2e-4, rtol=2e-4)


def test_crop_of_the_hybrid_cache_is_silently_wrong(target_of: Callable[[str], Target]) -> None:
    """The trap that this package avoids: recording the past and cropping raises nothing and gives other states."""
    target = target_of("qwen3_5")
    call = DecoderCall(target)
    ids = torch.randint(0, 250, (1, 30), generator=torch.Generator().manual_seed(5))
    prompt, block, after = ids[:, :20], ids[:, 20:26], ids[:, 26:]
    keep = 2
    true = alone(target, [*prompt[0].tolist(), *block[0, :keep].tolist(), *after[0].tolist()])[-4:]
    positions = torch.arange(40)[None]
    with torch.inference_mode():
        cache = call.new_cache()
        for layer in cache.layers:
            if hasattr(layer, "activate_past_recording"):
                layer.activate_past_recording()
        call(prompt, positions=positions[:, :20], mask=None, cache=cache)
        for layer in cache.layers:
            layer.crop(0)
        call(block, positions=positions[:, 20:26], mask=None, cache=cache)
        for layer in cache.layers:
            layer.crop(keep - BLOCK)
        cropped = call(after, positions=positions[:, 22:26], mask=None, cache=cache)[0]
        with TargetState(call, prefill(call, prompt.tolist(), None), 60) as state:
            state.verify(block)
            state.commit([keep])
            ours = state.verify(after)[0]
    torch.testing.assert_close(ours, true, atol=2e-4, rtol=2e-4)
    assert (cropped - true).abs().max() > 100 * (ours - true).abs().max()
    assert (cropped - true).abs().max() > 1e-2


def test_eager_attention_takes_an_additive_mask(
    target_of: Callable[[str], Target], prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = target_of("gemma3")
    monkeypatch.setattr(target.model.config, "_attn_implementation_internal", "eager")
    call = DecoderCall(target)
    block = torch.randint(0, 250, (len(prompts), BLOCK), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode(), TargetState(call, prefill(call, prompts, None), 100) as state:
        hidden = state.verify(block)
    for row, prompt in enumerate(prompts):
        expected = alone(target, prompt + block[row].tolist())[-BLOCK:]
        torch.testing.assert_close(hidden[row], expected, atol=2e-4, rtol=2e-4)


def test_attention_without_masks_is_refused(
    target_of: Callable[[str], Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = target_of("qwen3")
    call = DecoderCall(target)
    prefilled = prefill(call, [[1, 2]], None)
    monkeypatch.setattr(target.model.config, "_attn_implementation_internal", "flash_attention_2")
    with pytest.raises(DecodingError, match=r"flash_attention_2.*use sdpa or eager"):
        TargetState(call, prefilled, 20)


def test_unknown_cache_layers_are_refused(target_of: Callable[[str], Target]) -> None:
    call = DecoderCall(target_of("qwen3"))
    prefilled = prefill(call, [[1, 2]], None)

    class Strange(type(prefilled.cache.layers[0])):  # type: ignore[misc]
        """A cache layer that nobody has taught us."""

    prefilled.cache.layers[3] = Strange()
    with pytest.raises(DecodingError, match=r"layer 3.*Strange"):
        TargetState(call, prefilled, 20)


def test_hooks_are_gone_afterwards(target_of: Callable[[str], Target]) -> None:
    target = target_of("qwen3_5")
    call = DecoderCall(target)
    with TargetState(call, prefill(call, [[1, 2]], None), 20):
        assert any(m._forward_pre_hooks for m in target.model.modules())
    assert not any(m._forward_pre_hooks for m in target.model.modules())
