"""``no-leak``, ``packing-parity``, ``empty-batch``: each way in which a block sees too much, too little or nothing."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from slipstream.drafter import anchors as anchors_module
from slipstream.drafter import attention as attention_module
from slipstream.drafter.model import RMSNorm
from slipstream.preflight import CHEAP, block_checks, subject
from slipstream.target.features import FeatureReader
from slipstream.training.muon import MuonAdamW

ALL = tuple(CHEAP)
SLIDING = {"layer_types": ("sliding_attention",) * 2, "sliding_window": 9}
MIXED = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 9}
ONE = {"layers": 1, "layer_types": ("sliding_attention",), "sliding_window": 4}


@pytest.mark.parametrize("settings", [{}, SLIDING, MIXED, ONE, {"layers": 1}, {"block_size": 2}, {"block_size": 16}])
def test_every_kind_of_drafter_passes(settings, prepared, verdict) -> None:
    assert verdict(prepared(**settings), *ALL) == {}


def test_all_pass_with_muon(prepared, verdict) -> None:
    assert verdict(prepared(training={"optimizer": "muon", "weight_decay": 0.1}), *ALL) == {}


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "gemma3"])
def test_all_pass_with_soft_labels(family, prepared, verdict) -> None:
    assert verdict(prepared(family, training={"labels": "soft"}), *ALL) == {}


def test_a_matrix_that_an_update_without_anchors_changes_is_empty_batch(prepared, verdict, monkeypatch) -> None:
    genuine = MuonAdamW.step

    def always(self, closure=None) -> None:
        kept, self.found_inf = self.found_inf, None
        genuine(self)
        self.found_inf = kept

    monkeypatch.setattr(MuonAdamW, "step", always)
    failed = verdict(prepared(training={"optimizer": "muon", "weight_decay": 0.1}), "empty-batch")
    assert "_proj.weight; it must be skipped" in failed["empty-batch"]


def replace_predicate(monkeypatch, make) -> None:
    genuine = attention_module.predicate
    monkeypatch.setattr(attention_module, "predicate", lambda *a: make(genuine(*a), *a))


def test_a_causal_block_mask_is_no_leak(run, verdict, monkeypatch) -> None:
    def causal(allow, low, high, context, block, *_):
        return lambda r, h, q, k: allow(r, h, q, k) & ((k < context) | ((k - context) % block <= q % block))

    replace_predicate(monkeypatch, causal)
    failed = verdict(run, *ALL)
    assert set(failed) == {"no-leak"}
    assert "causal" in failed["no-leak"]


def test_a_sliding_layer_that_looks_ahead_is_no_leak(prepared, verdict, monkeypatch) -> None:
    def both(allow, low, high, context, block, *_):
        return lambda r, h, q, k: allow(r, h, q, k) | ((k >= context) & ((k - context) // block == q // block))

    replace_predicate(monkeypatch, both)
    failed = verdict(prepared(**SLIDING), *ALL)
    assert set(failed) == {"no-leak"}
    assert "causally" in failed["no-leak"]


def bounds(monkeypatch, change) -> None:
    genuine = attention_module.context_bounds

    def changed(anchors, start, keep):
        low, high = genuine(anchors, start, keep)
        return change(low, high, keep)

    monkeypatch.setattr(attention_module, "context_bounds", changed)


def test_a_context_up_to_the_anchor_itself_is_no_leak(run, verdict, monkeypatch) -> None:
    bounds(monkeypatch, lambda low, high, keep: (low, high + keep.int()))
    failed = verdict(run, *ALL)
    assert set(failed) == {"no-leak"}
    assert "strictly before the anchor" in failed["no-leak"]


def test_a_context_that_stops_early_is_no_leak(run, verdict, monkeypatch) -> None:
    bounds(monkeypatch, lambda low, high, keep: (low, (high - 1).clamp(min=0)))
    failed = verdict(run, *ALL)
    assert set(failed) == {"no-leak"}
    assert "does not see the feature" in failed["no-leak"]


def test_a_context_that_reaches_into_other_documents_is_no_leak(run, verdict, monkeypatch) -> None:
    bounds(monkeypatch, lambda low, high, keep: (torch.zeros_like(low), high))
    failed = verdict(run, *ALL)
    assert set(failed) == {"no-leak", "packing-parity"}  # the loss of packed rows changes with it
    assert "another document's" in failed["no-leak"]


def test_a_window_one_too_wide_is_no_leak(prepared, verdict, monkeypatch) -> None:
    genuine = attention_module.predicate
    monkeypatch.setattr(
        attention_module, "predicate", lambda lo, hi, c, b, w, n: genuine(lo, hi, c, b, w + 3 if w else 0)
    )
    failed = verdict(prepared(**SLIDING), *ALL)
    assert set(failed) == {"no-leak"}
    assert "outside its window" in failed["no-leak"]


@pytest.mark.parametrize(("layers", "cause"), [(1, "blocks see each other"), (2, "another document's")])
def test_blocks_that_see_each_other_are_no_leak(layers, cause, prepared, verdict, monkeypatch) -> None:
    """With two layers the other blocks also hand on what they see of their own documents."""
    replace_predicate(
        monkeypatch, lambda allow, low, high, context, *_: lambda r, h, q, k: allow(r, h, q, k) | (k >= context)
    )
    failed = verdict(prepared(layers=layers), *ALL)
    assert set(failed) == {"no-leak", "packing-parity"}
    assert cause in failed["no-leak"]


def test_anchors_from_the_first_document_alone_are_no_leak(run, verdict, monkeypatch) -> None:
    genuine = anchors_module.valid_anchors
    monkeypatch.setattr(anchors_module, "valid_anchors", lambda batch: genuine(batch) & (batch.document_ids == 0))
    failed = verdict(run, "no-leak", "packing-parity")
    assert "anchors are not drawn from every document" in failed["no-leak"]
    assert set(failed) == {"no-leak", "packing-parity"}


def test_a_leaked_document_in_the_features_is_packing_parity(run, verdict, monkeypatch) -> None:
    genuine = FeatureReader._forward
    monkeypatch.setattr(FeatureReader, "_forward", lambda self, ids, positions=None: genuine(self, ids, None))
    failed = verdict(run, *ALL)
    assert set(failed) == {"packing-parity"}
    assert "target.packing = unpacked" in failed["packing-parity"]


def test_a_recurrent_state_that_runs_on_is_packing_parity(prepared, verdict, monkeypatch) -> None:
    run = prepared("qwen3_5")
    assert run.reader.packing == "packed, recurrent layers by documents"
    assert verdict(run, *ALL) == {}
    monkeypatch.setattr(run.reader, "recurrent", None)
    assert set(verdict(run, *ALL)) == {"packing-parity"}


def test_labels_from_the_next_document_are_packing_parity(run, verdict, monkeypatch) -> None:
    genuine = anchors_module.blocks_at

    def joined(batch, *args, **kwargs):
        one = torch.where(batch.document_ids >= 0, 0, -1)
        blocks = genuine(dataclasses.replace(batch, document_ids=one), *args, **kwargs)
        return blocks

    monkeypatch.setattr(anchors_module, "blocks_at", joined)
    failed = verdict(run, *ALL)
    assert set(failed) == {"packing-parity"}
    assert "weight" in failed["packing-parity"]


def test_positions_counted_in_the_row_are_packing_parity(run, verdict, monkeypatch) -> None:
    genuine = anchors_module.blocks_at

    def absolute(batch, anchors, keep, **kwargs):
        blocks = genuine(batch, anchors, keep, **kwargs)
        positions = anchors[..., None] + torch.arange(kwargs["block_size"])
        return dataclasses.replace(blocks, positions=positions)

    monkeypatch.setattr(anchors_module, "blocks_at", absolute)
    assert set(verdict(run, *ALL)) == {"packing-parity"}


def change_step(monkeypatch, change) -> None:
    genuine = subject.training_step
    monkeypatch.setattr(subject, "training_step", lambda *a, **k: change(genuine(*a, **k)))


def test_a_loss_divided_by_no_weight_is_empty_batch(run, verdict, monkeypatch) -> None:
    change_step(monkeypatch, lambda r: dataclasses.replace(r, loss_sum=r.loss_sum / r.weight_sum))
    assert "empty-batch" in verdict(run, "empty-batch")


def test_a_step_that_leaves_out_the_backward_pass_is_empty_batch(run, verdict, monkeypatch) -> None:
    def skip(result):
        return result if float(result.weight_sum) else dataclasses.replace(result, loss_sum=result.loss_sum.detach())

    change_step(monkeypatch, skip)
    failed = verdict(run, *ALL)
    assert set(failed) == {"empty-batch"}
    assert "wait for ever" in failed["empty-batch"]


def test_a_gradient_that_is_not_finite_is_empty_batch(run, verdict, monkeypatch) -> None:
    """As eager softmax gives for a query that sees nothing."""
    genuine = attention_module.masked_attention

    def eager(q, k, v, mask):
        blind = ~mask.any(-1, keepdim=True)
        return torch.where(blind, float("nan"), genuine(q, k, v, mask | blind))

    def nothing(allow, low, high, context, block, *_):
        return lambda r, h, q, k: allow(r, h, q, k) & (high[r, q // block] > low[r, q // block])

    replace_predicate(monkeypatch, nothing)
    monkeypatch.setattr(attention_module, "masked_attention", eager)
    failed = verdict(run, "empty-batch")
    assert "not finite" in failed["empty-batch"]


def test_a_parameter_without_gradient_is_empty_batch(run, verdict, monkeypatch) -> None:
    genuine = RMSNorm.forward

    def frozen(self, x):
        weight = self.weight.detach()
        wide = x.float()
        return (weight * wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)

    assert genuine is not frozen
    monkeypatch.setattr(RMSNorm, "forward", frozen)
    failed = verdict(run, *ALL)
    assert set(failed) == {"empty-batch"}
    assert "without a gradient" in failed["empty-batch"]


def test_an_update_that_moves_weights_without_a_batch_is_empty_batch(run, verdict, monkeypatch) -> None:
    genuine = block_checks.Updater.apply

    def apply(self, **kwargs):
        norm = genuine(self, **kwargs)
        with torch.no_grad():
            for parameter in self.parameters:
                parameter.mul_(1.5)
        return norm

    before = {name: p.detach().clone() for name, p in run.draft_model.named_parameters()}
    monkeypatch.setattr(block_checks.Updater, "apply", apply)
    failed = verdict(run, "empty-batch")
    assert "must be skipped" in failed["empty-batch"]
    with torch.no_grad():
        for name, parameter in run.draft_model.named_parameters():
            parameter.copy_(before[name])
