"""Final states: what the target's head would read, for every token, of each document alone."""

from __future__ import annotations

import pytest
import torch

from slipstream.errors import TargetError
from slipstream.target.features import FeatureReader
from support.tiny import FAMILIES, HIDDEN
from support.watching import calls_of
from unit.target.conftest import documents_of, load_in, packed_batch

IDS = (1, 3)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("packing", ["auto", "unpacked"])
def test_the_head_makes_the_targets_own_logits_of_them(target_of, family, packing):
    target = target_of(family)
    batch = packed_batch()
    found = FeatureReader(target, IDS, packing, final_states=True).read(batch)
    assert found.final_states is not None
    assert found.final_states.shape == (*batch.ids.shape, HIDDEN)
    assert found.final_states.dtype == target.dtype
    assert not found.final_states.requires_grad
    for row, place in documents_of(batch):
        with torch.no_grad():
            expected = target.model(input_ids=batch.ids[row : row + 1, place], use_cache=False).logits[0]
            given = target.head(found.final_states[row, place])
        torch.testing.assert_close(given, expected, rtol=2e-4, atol=2e-4)
    assert not found.final_states[batch.document_ids < 0].any()
    # The features are those of a forward that stops early.
    plain = FeatureReader(target, IDS, packing).read(batch)
    assert plain.final_states is None
    torch.testing.assert_close(found.features, plain.features, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("packing", ["packed", "unpacked"])
def test_the_last_layer_and_the_norm_run_and_the_head_does_not(target_of, packing):
    target = target_of("qwen3")
    reader = FeatureReader(target, IDS, packing, final_states=True)
    last = len(target.parts.layers) - 1
    watched = {"head": target.parts.lm_head, "norm": target.parts.norm, "last": target.parts.layers[last]}
    with calls_of(watched) as calls:
        reader.read(packed_batch())
    assert set(calls) == {"last", "norm"}


def test_final_states_that_are_not_finite_are_named(target_of, monkeypatch):
    target = target_of("llama")
    reader = FeatureReader(target, IDS, "unpacked", final_states=True)
    forward = target.parts.norm.forward
    monkeypatch.setattr(target.parts.norm, "forward", lambda x: forward(x) * float("nan"))
    with pytest.raises(TargetError, match=r"rows \[0, 1, 2\] at layers \['final norm'\] are not finite"):
        reader.read(packed_batch())


def test_the_probe_looks_at_them_too(directory_of, monkeypatch, capsys):
    """A leak in the last layer alone: no tap sees it."""
    target = load_in(directory_of("llama"))
    last = target.parts.layers[-1]
    forward = last.forward

    def leaking(x, *rest, **more):
        return forward(x, *rest, **more) + x.mean(1, keepdim=True)

    monkeypatch.setattr(last, "forward", leaking)
    assert FeatureReader(target, IDS).mode == "packed"
    assert FeatureReader(target, IDS, final_states=True).mode == "unpacked"
    assert "documents leak" in capsys.readouterr().err


def test_a_batch_moves_with_all_its_tensors(target_of):
    found = FeatureReader(target_of("llama"), IDS, final_states=True).read(packed_batch())
    moved = found.to("meta")
    assert moved.final_states is not None
    assert {moved.features.device.type, moved.final_states.device.type, moved.batch.ids.device.type} == {"meta"}
    assert moved.final_states.shape == found.final_states.shape
    assert FeatureReader(target_of("llama"), IDS).read(packed_batch()).to("cpu").final_states is None
