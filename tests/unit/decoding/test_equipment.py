"""A target is equipped once for all runs inside a context, and is as it was outside."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from slipstream.config import DrafterSettings
from slipstream.decoding import packed
from slipstream.decoding.equipment import equipped
from slipstream.decoding.prefill import DecoderCall
from slipstream.decoding.speculative import decode_plain, generate_speculative
from slipstream.drafter.config import resolve
from slipstream.drafter.model import DraftModel
from slipstream.target.model import Target


def changed(model: torch.nn.Module) -> int:
    return sum("forward" in module.__dict__ for module in model.modules())


@pytest.fixture(autouse=True)
def pack_small_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "LEAST_WEIGHTS", 1)


def test_runs_inside_share_one_equipment(target_of: Callable[[str], Target], prompts: list[list[int]]) -> None:
    target = target_of("qwen3_5")
    config = resolve(DrafterSettings(layers=1, block_size=5, target_layer_ids=(1, 4)), target.info, 300)
    model = DraftModel(config).eval()
    with equipped(target) as made:
        inside, own = changed(target.model), changed(model)
        assert inside > 40
        assert own == 0
        with equipped(target, model) as again:
            assert again is made
            assert changed(model) > 5
        assert (changed(target.model), changed(model)) == (inside, 0)
        assert DecoderCall(target).short_blocks is made.short_blocks
        first = decode_plain(target, prompts, max_new_tokens=6, batch_size=3)
        assert made.short_blocks.proven == {1}
        second, _ = generate_speculative(target, model, config, prompts, max_new_tokens=6, batch_size=3)
        assert made.short_blocks.proven == {1, 5}, "each length proves itself"
        assert [g.output_ids for g in second] == [g.output_ids for g in first.generations]
        assert changed(target.model) == inside
    assert changed(target.model) == 0
    assert DecoderCall(target).short_blocks is not made.short_blocks


def test_what_fails_inside_leaves_no_trace(target_of: Callable[[str], Target]) -> None:
    target = target_of("qwen3_5")
    with pytest.raises(KeyError), equipped(target):
        raise KeyError
    assert changed(target.model) == 0
    with equipped(target) as made:
        assert made.linears == ""


def test_answers_are_the_same_with_every_layer_laid_out(
    target_of: Callable[[str], Target],
    answers_of: Callable[[str], list[list[int]]],
    prompts: list[list[int]],
) -> None:
    for family in ("qwen3_5", "llama"):
        found = decode_plain(target_of(family), prompts, max_new_tokens=20, batch_size=4)
        assert [list(g.output_ids) for g in found.generations] == [a[:20] for a in answers_of(family)]
