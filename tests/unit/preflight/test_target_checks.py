"""``head-parity`` and ``tied-head`` see a target that is read or borrowed wrongly."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from slipstream.preflight import CHEAP
from slipstream.target.features import Taps
from slipstream.target.model import Target
from slipstream.training import step

ALL = tuple(CHEAP)


def test_a_tap_of_the_layer_before_is_head_parity(run, verdict, monkeypatch) -> None:
    genuine = Taps.__init__

    def off_by_one(self, target, layer_ids, **kwargs):
        genuine(self, target, [max(i - 1, 0) for i in layer_ids], **kwargs)

    monkeypatch.setattr(Taps, "__init__", off_by_one)
    failed = verdict(run, *ALL)
    assert set(failed) == {"head-parity", "tied-head"}  # the last state, one layer early, feeds both
    assert "off by one" in failed["head-parity"]


def test_only_the_drafters_taps_off_by_one_is_head_parity_alone(run, verdict, monkeypatch) -> None:
    genuine = Taps.__init__

    def off_by_one(self, target, layer_ids, **kwargs):
        ids = list(layer_ids)
        genuine(self, target, [i + 1 for i in ids] if len(ids) > 1 else ids, **kwargs)

    monkeypatch.setattr(Taps, "__init__", off_by_one)
    assert set(verdict(run, *ALL)) == {"head-parity"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("by", [-1, 1])
def test_soft_labels_of_another_token_are_head_parity(by, dtype, prepared, verdict, monkeypatch) -> None:
    """Nothing else would see it: the loss falls, and the drafter learns to be a token late."""
    genuine = step.label_sources

    def moved(blocks, tokens):
        return (genuine(blocks, tokens) + by).clamp(0, blocks.labels.shape[0] * tokens - 1)

    monkeypatch.setattr(step, "label_sources", moved)
    # Nearly uniform distributions are all alike; this target is sure of something.
    run = prepared("llama", dtype=dtype, training={"labels": "soft"})
    sharp = Target.head
    monkeypatch.setattr(Target, "head", lambda self, hidden: 20 * sharp(self, hidden))
    forward = run.target.model.forward

    def sure(*args, **kwargs):
        out = forward(*args, **kwargs)
        out.logits = 20 * out.logits
        return out

    monkeypatch.setattr(run.target.model, "forward", sure)
    failed = verdict(run, *ALL)
    assert set(failed) - {"packing-parity"} == {"head-parity"}  # a token early may be another document's
    assert "another token's" in failed["head-parity"]
    monkeypatch.setattr(step, "label_sources", genuine)
    assert verdict(run, *ALL) == {}


def test_soft_labels_that_are_scaled_unlike_the_target_are_head_parity(prepared, verdict, monkeypatch) -> None:
    genuine = Target.head
    monkeypatch.setattr(Target, "head", lambda self, hidden: 3 * genuine(self, hidden))  # chooses the same tokens
    run = prepared("llama", training={"labels": "soft"})
    failed = verdict(run, *ALL)
    assert set(failed) == {"head-parity"}
    assert "scale or cap" in failed["head-parity"]


def test_a_random_head_module_is_head_parity(run, verdict, monkeypatch) -> None:
    head = nn.Linear(64, 320, bias=False)
    monkeypatch.setattr(Target, "head", lambda self, hidden: head(hidden))
    failed = verdict(run, *ALL)
    assert set(failed) == {"head-parity"}
    assert "head is not the target's" in failed["head-parity"]


def test_a_missing_final_norm_is_seen(run, verdict, monkeypatch) -> None:
    with torch.no_grad():
        weight = torch.randn(64) * 3

    class Skewed(nn.Module):
        def forward(self, x):
            return x * weight

    import dataclasses

    monkeypatch.setattr(run.target, "parts", dataclasses.replace(run.target.parts, norm=Skewed()))
    assert "head-parity" in verdict(run, "head-parity", "tied-head")


def test_a_random_head_weight_is_tied_head(run, verdict, monkeypatch) -> None:
    weight = torch.randn(320, 64)
    monkeypatch.setattr(Target, "head_weight", property(lambda self: weight))
    failed = verdict(run, *ALL)
    assert set(failed) == {"tied-head"}
    assert "output embedding" in failed["tied-head"]


def test_a_tied_target_with_a_head_of_its_own_is_tied_head(prepared, verdict, monkeypatch) -> None:
    run = prepared("llama")
    monkeypatch.setattr(run.target.parts.lm_head, "weight", nn.Parameter(torch.randn(320, 64), requires_grad=False))
    failed = verdict(run, *ALL)
    assert set(failed) == {"tied-head"}
    assert "random" in failed["tied-head"]


def test_an_embedding_without_its_scale_is_tied_head(prepared, verdict, monkeypatch) -> None:
    monkeypatch.setattr(Target, "embed", lambda self, ids: F.embedding(ids, self.parts.embed_tokens.weight))
    failed = verdict(prepared("gemma3"), *ALL)
    assert set(failed) == {"tied-head"}
    assert "scale" in failed["tied-head"]
    assert verdict(prepared("qwen3"), "tied-head") == {}  # where nothing scales, nothing is missing


def test_a_trainable_target_is_tied_head(run, verdict) -> None:
    parameter = run.target.parts.lm_head.weight
    parameter.requires_grad_(True)
    try:
        assert set(verdict(run, *ALL)) == {"tied-head"}
    finally:
        parameter.requires_grad_(False)
