"""Plain decoding's buffers hold what a growing cache holds, and its steps give the states of the text alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers.cache_utils import DynamicLayer

from slipstream.decoding.prefill import DecoderCall, prefill
from slipstream.decoding.steps import BufferLayer, StepState
from slipstream.target.model import Target
from support.tiny import FAMILIES


@pytest.mark.parametrize("capacity", [0, 8, 64])
def test_buffers_equal_a_cache_that_grows(capacity: int) -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(rows: int, length: int) -> torch.Tensor:
        return torch.randn(rows, 2, length, 5, generator=generator)

    reference = DynamicLayer()
    reference.update(draw(4, 7), draw(4, 7))
    assert reference.keys is not None
    assert reference.values is not None
    layer = BufferLayer(reference.keys, reference.values, capacity)
    rows = 4
    for length in (1, 1, 3, 1, 40, 1, 1):
        new = draw(rows, length), draw(rows, length)
        torch.testing.assert_close(layer.update(*new), reference.update(*new), atol=0, rtol=0)
        assert layer.get_seq_length() == reference.get_seq_length()
        assert layer.get_mask_sizes(1) == reference.get_mask_sizes(1)
        if length == 3:
            rows = 2
            for either in (layer, reference):
                either.reorder_cache(torch.tensor([3, 1]))


def test_a_token_is_written_into_room_that_is_there() -> None:
    layer = BufferLayer(torch.zeros(1, 2, 7, 5), torch.zeros(1, 2, 7, 5), 32)
    place = layer.keys.data_ptr()
    for _ in range(25):
        layer.update(torch.ones(1, 2, 1, 5), torch.ones(1, 2, 1, 5))
    assert layer.keys.data_ptr() == place
    assert layer.get_seq_length() == 32


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_steps_equal_the_text_alone(family: str, target_of: Callable[[str], Target], prompts: list[list[int]]) -> None:
    target = target_of(family)
    call = DecoderCall(target)
    text = [list(p) for p in prompts]
    generator = torch.Generator().manual_seed(8)
    with StepState(call, prefill(call, prompts, None), 9) as steps:
        for number in range(9):
            if number == 4:
                text = [text[3], text[0]]
                steps.keep([3, 0])
            tokens = torch.randint(0, 250, (len(text),), generator=generator)
            hidden = steps.step(tokens)
            for row, token in enumerate(tokens.tolist()):
                text[row].append(token)
                alone = target.parts.decoder(input_ids=torch.tensor([text[row]]), use_cache=False).last_hidden_state
                torch.testing.assert_close(hidden[row], alone[0, -1], atol=2e-4, rtol=2e-4)
    assert call.short_blocks.proven == ({1} if family == "qwen3_5" else set())
    assert not any("forward" in m.__dict__ for m in target.model.modules())
