"""``overfit`` and ``lossless`` see a drafter that does not learn, one that learned something else, and wrong output."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from slipstream.decoding import proposer, recurrent, speculative
from slipstream.decoding.rollback import TargetState
from slipstream.drafter import anchors as anchors_module
from slipstream.drafter.model import DraftModel
from slipstream.preflight import decoding_checks
from slipstream.preflight.decoding_checks import best_tau
from slipstream.preflight.subject import Subject

BOTH = ("overfit", "lossless")


def test_the_best_tau_of_an_answer() -> None:
    assert best_tau(33, 8) == 8.0
    assert best_tau(17, 16) == 16.0
    assert best_tau(9, 8) == 8.0
    assert best_tau(10, 8) == 4.5  # nine tokens in two passes
    assert best_tau(1, 8) == 0.0


def both_names(monkeypatch, blocks_at) -> None:
    monkeypatch.setattr(anchors_module, "blocks_at", blocks_at)
    monkeypatch.setattr(decoding_checks, "blocks_at", blocks_at)


@pytest.mark.parametrize("training", [{"optimizer": "muon", "muon_learning_rate": 1e-5}, {"labels": "soft"}])
def test_both_pass_with_either_option(training, prepared, verdict) -> None:
    """Whatever rate the recipe has, and although the target is sure of nothing: the check brings its own."""
    assert verdict(prepared(training=training), *BOTH) == {}


def test_labels_shifted_by_one_are_overfit(run, verdict, monkeypatch) -> None:
    """The classic: training accuracy is perfect, and nothing is accepted."""
    genuine = anchors_module.blocks_at

    def shifted(batch, anchors, keep, **kwargs):
        later = dataclasses.replace(batch, ids=torch.cat((batch.ids[:, 1:], batch.ids[:, :1]), 1))
        blocks = genuine(later, anchors, keep, **kwargs)
        noise = genuine(batch, anchors, keep, **kwargs).noise_ids
        return dataclasses.replace(blocks, noise_ids=noise)

    both_names(monkeypatch, shifted)
    failed = verdict(run, *BOTH)
    assert set(failed) == {"overfit"}
    assert "right in training" in failed["overfit"]


def test_another_position_in_training_is_overfit(run, verdict, monkeypatch) -> None:
    genuine = anchors_module.blocks_at

    def moved(batch, anchors, keep, **kwargs):
        blocks = genuine(batch, anchors, keep, **kwargs)
        return dataclasses.replace(blocks, positions=blocks.positions + 40)

    both_names(monkeypatch, moved)
    assert set(verdict(run, *BOTH)) == {"overfit"}


def test_another_mask_token_in_decoding_is_overfit(run, verdict, monkeypatch) -> None:
    genuine = proposer.DrafterProposer.__init__

    def other(self, target, model, config):
        genuine(self, target, model, dataclasses.replace(config, mask_token_id=config.mask_token_id + 7))

    monkeypatch.setattr(proposer.DrafterProposer, "__init__", other)
    assert set(verdict(run, *BOTH)) == {"overfit"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_taps_in_another_order_in_decoding_are_overfit(dtype, prepared, verdict, monkeypatch) -> None:
    run = prepared(dtype=dtype)
    for name, place in (("start", 2), ("observe", 0)):
        genuine = getattr(proposer.DrafterProposer, name)

        def turned(self, *args, genuine=genuine, place=place):
            rolled = [a.roll(64, -1) if i == place else a for i, a in enumerate(args)]
            return genuine(self, *rolled)

        monkeypatch.setattr(proposer.DrafterProposer, name, turned)
    assert set(verdict(run, *BOTH)) == {"overfit"}


def test_a_drafter_that_does_not_learn_is_overfit(run, verdict, monkeypatch) -> None:
    monkeypatch.setattr(decoding_checks, "MOST_STEPS", 20)
    monkeypatch.setattr(decoding_checks, "LEARNING_RATE", 1e-9)
    failed = verdict(run, *BOTH)
    assert set(failed) == {"overfit"}
    assert "does not learn" in failed["overfit"]


def test_a_machine_that_is_too_slow_is_not_told_that_it_does_not_learn(run, verdict, monkeypatch) -> None:
    monkeypatch.setattr(decoding_checks, "SECONDS", 0.0)
    failed = verdict(run, "overfit")
    assert "out of time" in failed["overfit"]


def test_random_drafts_from_the_decoder_are_overfit(run, verdict, monkeypatch) -> None:
    genuine = DraftModel.draft
    monkeypatch.setattr(DraftModel, "draft", lambda self, *a, **k: torch.randn_like(genuine(self, *a, **k)))
    assert set(verdict(run, *BOTH)) == {"overfit"}


def test_a_token_that_the_target_did_not_choose_is_lossless(run, verdict, monkeypatch) -> None:
    genuine = speculative.choose

    def wrong(logits, *args):
        tokens, finite = genuine(logits, *args)
        if tokens.dim() == 2:
            tokens = torch.cat((tokens[:, :2], (tokens[:, 2:] + 1) % logits.shape[-1]), 1)
        return tokens, finite

    monkeypatch.setattr(speculative, "choose", wrong)
    failed = verdict(run, *BOTH)
    assert "lossless" in failed
    assert "where plain decoding writes" in failed["lossless"]


def test_a_state_that_keeps_too_much_is_lossless(run, verdict, monkeypatch) -> None:
    genuine = TargetState.commit
    monkeypatch.setattr(TargetState, "commit", lambda self, counts: genuine(self, [c + 1 if c else 0 for c in counts]))
    assert "lossless" in verdict(run, "lossless")


def test_a_recurrent_state_that_is_not_rolled_back_is_lossless(prepared, verdict, monkeypatch) -> None:
    """Cropping keys and values is not enough for a hybrid target."""
    run = prepared("qwen3_5")
    assert verdict(run, *BOTH) == {}
    found = [
        cls for cls in vars(recurrent).values()
        if isinstance(cls, type) and cls.__module__ == recurrent.__name__ and "roll_back" in vars(cls)
    ]  # fmt: skip
    assert found
    for cls in found:
        monkeypatch.setattr(cls, "roll_back", lambda self, *args: None)
    failed = verdict(run, "lossless")
    assert "rollback" in failed["lossless"]


def test_a_target_that_says_nothing_is_told(run, verdict, monkeypatch) -> None:
    from slipstream.records import Generation

    silent = [Generation(prompt_ids=(1,), output_ids=(257,), finish="eos")]
    monkeypatch.setattr(decoding_checks, "reproducible_answers", lambda *a, **k: silent)
    failed = verdict(run, *BOTH)
    assert set(failed) == set(BOTH)
    assert "prompts that it answers" in failed["overfit"]


def test_raw_text_without_prompts_has_a_first_token_as_prompt(run) -> None:
    assert all(len(p) >= 1 for p in decoding_checks.prompts_of(Subject(run), 4))


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "llama"])
def test_near_ties_of_a_bfloat16_target_are_no_fault_of_the_drafter(family, prepared, verdict) -> None:
    assert verdict(prepared(family, dtype="bfloat16", block_size=4), *BOTH) == {}


def test_a_fault_of_decoding_is_seen_in_bfloat16_too(prepared, verdict, monkeypatch) -> None:
    run = prepared("qwen3", dtype="bfloat16", block_size=4)
    genuine = speculative.choose

    def wrong(logits, *args):
        tokens, finite = genuine(logits, *args)
        return (logits.argmin(-1) if tokens.dim() == 2 else tokens), finite

    monkeypatch.setattr(speculative, "choose", wrong)
    assert "lossless" in verdict(run, "lossless")


@pytest.mark.parametrize(
    "settings",
    [
        {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 12},
        {"layer_types": ("sliding_attention",) * 2, "sliding_window": 12},
        {"block_size": 4},
        {"block_size": 2},
    ],
)
def test_other_shapes_of_drafter_pass(settings, prepared, verdict) -> None:
    assert verdict(prepared(**settings), *BOTH) == {}
