"""``norms-move`` and ``exact-resume`` see weights that do not move, and runs that do not go on as they were."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from slipstream.drafter.model import RMSNorm
from slipstream.preflight import training_checks
from slipstream.training import loop, session, state
from slipstream.training.loop import Trainer

BOTH = ("norms-move", "exact-resume")


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_both_pass(family, prepared, verdict) -> None:
    assert verdict(prepared(family), *BOTH) == {}


@pytest.mark.parametrize("training", [{"optimizer": "muon", "weight_decay": 0.1}, {"labels": "soft"}])
def test_both_pass_with_either_option(training, prepared, verdict) -> None:
    assert verdict(prepared(training=training), *BOTH) == {}


def cast_drafter(monkeypatch, cast) -> None:
    genuine = session.build_drafter

    def build(*args):
        model = genuine(*args)
        cast(model)
        return model

    monkeypatch.setattr(session, "build_drafter", build)


def norms_to_bfloat16(model) -> None:
    for module in model.modules():
        if isinstance(module, RMSNorm):
            module.to(torch.bfloat16)


@pytest.mark.parametrize("cast", [norms_to_bfloat16, lambda m: m.to(torch.bfloat16)], ids=["norms", "everything"])
@pytest.mark.parametrize("guarded", [True, False])
def test_bfloat16_master_weights_are_norms_move(cast, guarded, run, verdict, monkeypatch) -> None:
    cast_drafter(monkeypatch, cast)
    if not guarded:  # an optimizer that takes what it is given, as most do
        monkeypatch.setattr(state, "assert_full_precision", lambda *_: None)
        monkeypatch.setattr(
            state, "build_optimizer", lambda m, s: torch.optim.AdamW(m.parameters(), lr=s.learning_rate)
        )
    failed = verdict(run, "norms-move")
    assert "float32" in failed["norms-move"]


def test_norms_that_do_not_move_are_norms_move(run, verdict, monkeypatch) -> None:
    """As bfloat16 rounding does: the gradient is there, the weight stays."""
    genuine = state.Updater.apply

    def rounded(self, **kwargs):
        norm = genuine(self, **kwargs)
        with torch.no_grad():
            for parameter in self.parameters:
                if parameter.dim() < 2:
                    parameter.copy_(parameter.bfloat16())
        return norm

    monkeypatch.setattr(state.Updater, "apply", rounded)
    failed = verdict(run, *BOTH)
    assert set(failed) == {"norms-move"}
    assert "did not move" in failed["norms-move"]


def test_a_tensor_without_gradient_is_norms_move(run, verdict, monkeypatch) -> None:
    def frozen(self, x):
        wide = x.float()
        return (self.weight.detach() * wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)

    monkeypatch.setattr(RMSNorm, "forward", frozen)
    assert "did not move" in verdict(run, "norms-move")["norms-move"]


def test_both_pass_with_another_seed(run, verdict) -> None:
    recipe = dataclasses.replace(run.recipe, run=dataclasses.replace(run.recipe.run, seed=1))
    assert verdict(dataclasses.replace(run, recipe=recipe), *BOTH) == {}


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_moments_that_are_not_restored_are_exact_resume(optimizer, prepared, verdict, monkeypatch) -> None:
    run = prepared(training={"optimizer": optimizer})
    monkeypatch.setattr(state, "restore_optimizer", lambda *_: None)
    assert set(verdict(run, *BOTH)) == {"exact-resume"}


def test_generators_that_are_not_restored_are_exact_resume(run, verdict, monkeypatch) -> None:
    genuine = Trainer.restore

    def restore(self, state, moments, checkpoint):
        before = torch.get_rng_state()
        genuine(self, state, moments, checkpoint)
        torch.set_rng_state(before)

    monkeypatch.setattr(Trainer, "restore", restore)
    failed = verdict(run, *BOTH)
    assert set(failed) == {"exact-resume"}
    assert "rng" in failed["exact-resume"]


def test_anchors_that_depend_on_the_process_are_exact_resume(run, verdict, monkeypatch) -> None:
    shared = torch.Generator().manual_seed(0)
    monkeypatch.setattr(loop, "anchor_generator", lambda *_: shared)
    monkeypatch.setattr(training_checks, "DOCUMENTS", 1)  # fewer anchors than there are, so that a draw chooses
    assert set(verdict(run, "exact-resume")) == {"exact-resume"}


def test_a_data_position_that_starts_again_is_exact_resume(run, verdict, monkeypatch) -> None:
    genuine = Trainer.restore

    def restore(self, state, moments, checkpoint):
        genuine(self, state, moments, checkpoint)
        self.step = 0

    monkeypatch.setattr(Trainer, "restore", restore)
    failed = verdict(run, "exact-resume")
    assert "goes on at step 0" in failed["exact-resume"]


def test_a_metric_window_that_is_not_restored_is_exact_resume(run, verdict, monkeypatch) -> None:
    monkeypatch.setattr(state.MetricWindow, "restore", lambda *_: None)
    failed = verdict(run, "exact-resume")
    assert "window" in failed["exact-resume"]


def test_weights_rounded_on_the_disk_are_exact_resume(run, verdict, monkeypatch) -> None:
    genuine = state.save_drafter
    monkeypatch.setattr(state, "save_drafter", lambda m, c, p, **k: genuine(m, c, p, **{**k, "dtype": torch.bfloat16}))
    failed = verdict(run, "exact-resume")
    assert "float32" in failed["exact-resume"]


def test_a_checkpoint_that_is_not_found_is_exact_resume(run, verdict, monkeypatch) -> None:
    monkeypatch.setattr(training_checks, "latest_checkpoint", lambda _: None)
    assert "not found" in verdict(run, "exact-resume")["exact-resume"]
