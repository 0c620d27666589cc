"""Buffers in which index equals position: what a pass writes, sees and forgets."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from slipstream.decoding.prefill import DecoderCall, prefill
from slipstream.decoding.ragged import ROUND, Cursor, RaggedLayer, buffer_of
from slipstream.decoding.rollback import TargetState
from slipstream.target.model import Target


@pytest.mark.parametrize("window", [None, 1, 5, 40])
def test_the_mask_is_causal_and_windowed_by_true_positions(window: int | None) -> None:
    starts, length = torch.tensor([[50], [71]]), 3
    cursor = Cursor(positions=starts + torch.arange(length), rows=torch.arange(2)[:, None], low=50, high=74)
    first, end = cursor.span(window, 4 * ROUND)
    allowed = cursor.allowed(window, 4 * ROUND)
    assert allowed.shape == (2, 1, length, end - first)
    for row in range(2):
        for slot in range(length):
            position = int(starts[row]) + slot
            low = 0 if window is None else position - window + 1
            seen = [j for j in range(low, position + 1) if j >= 0]
            assert (allowed[row, 0, slot].nonzero().flatten() + first).tolist() == seen


def test_update_writes_each_row_at_its_own_place_and_keep_drops_rows() -> None:
    cursor = Cursor(positions=torch.tensor([[2, 3], [5, 6]]), rows=torch.arange(2)[:, None], low=2, high=7)
    layer = RaggedLayer(torch.zeros(2, 1, ROUND, 1), torch.zeros(2, 1, ROUND, 1), cursor, None)
    new = torch.tensor([[[[1.0], [2.0]]], [[[3.0], [4.0]]]])
    keys, values = layer.update(new, 10 * new)
    assert keys[0, 0, :, 0].nonzero().flatten().tolist() == [2, 3]
    assert keys[1, 0, 5:7, 0].tolist() == [3.0, 4.0]
    assert values[1, 0, 6, 0] == 40.0
    assert layer.get_mask_sizes(2) == (ROUND, 0)
    layer.keep(torch.tensor([1]))
    assert layer.keys.shape[0] == 1
    assert layer.keys[0, 0, 5, 0] == 3.0


def test_what_was_never_written_is_zero() -> None:
    states = torch.ones(1, 1, 2, 1)
    buffer = buffer_of(states, torch.tensor([1, 0, 1])[None, None, :, None], ROUND)
    assert buffer.flatten().tolist() == [1.0] * 3 + [0.0] * (ROUND - 3)


def test_windows_far_from_the_start_read_part_of_the_buffer(target_of: Callable[[str], Target]) -> None:
    """Long prompts on a target with a window of 24: the first columns are not read, and nothing changes."""
    target, call = target_of("gemma3"), DecoderCall(target_of("gemma3"))
    generator = torch.Generator().manual_seed(2)
    kept = [torch.randint(0, 250, (n,), generator=generator).tolist() for n in (90, 70, 101)]
    with torch.inference_mode(), TargetState(call, prefill(call, kept, None), 180) as state:
        for counts in ([1, 6, 3], [6, 2, 1], [5, 5, 6], [2, 6, 1]):
            block = torch.randint(0, 250, (3, 6), generator=generator)
            hidden = state.verify(block)
            assert state._cursor.span(24, 192)[0] > 0
            for row, count in enumerate(counts):
                ids = torch.tensor([kept[row] + block[row].tolist()])
                expected = target.parts.decoder(input_ids=ids, use_cache=False).last_hidden_state[0, -6:]
                torch.testing.assert_close(hidden[row], expected, atol=2e-4, rtol=2e-4)
                kept[row] += block[row, :count].tolist()
            state.commit(counts)
