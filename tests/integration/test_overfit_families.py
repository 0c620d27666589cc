"""Every family: twenty of the target's own answers, learned by heart, are decoded at tau = B by the real decoder."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.config import DataConfig, DrafterSettings, Recipe, RunConfig, TargetConfig, TrainingConfig
from slipstream.decoding.acceptance import summarise
from slipstream.decoding.losslessness import compare_lossless
from slipstream.decoding.speculative import generate_plain, generate_speculative
from slipstream.preflight.decoding_checks import Sample, best_tau, decoding_model, overfit_run, train_on
from slipstream.training.session import prepare
from support.tiny import FAMILIES, save_tiny_target, write_conversations

BLOCK = 8
SAMPLES = 20
PASSES = 3
TOKENS = 1 + PASSES * BLOCK


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_twenty_samples_decode_at_the_block_size(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    target_directory = save_tiny_target(tmp_path / "target", family)
    data = write_conversations(tmp_path / "train.jsonl", SAMPLES)
    recipe = Recipe(
        target=TargetConfig(path=str(target_directory), dtype="float32"),
        data=DataConfig(train=(str(data),), row_length=160),
        drafter=DrafterSettings(layers=2, block_size=BLOCK),
        training=TrainingConfig(precision="float32"),
        run=RunConfig(device="cpu"),
    )
    run = prepare(recipe, say=lambda _: None)
    prompts = []
    for ids, mask in run.dataset.documents():
        first = int(mask.nonzero()[0][0])
        prompts.append([int(i) for i in ids[:first]])
    assert len(prompts) == SAMPLES

    # No eos, so that every answer ends with a whole block and tau = B is what a perfect drafter gets.
    monkeypatch.setattr(run.target, "info", _without_eos(run.target.info))
    plain, _ = generate_plain(run.target, prompts, max_new_tokens=TOKENS, batch_size=SAMPLES)
    assert len({g.output_ids for g in plain}) > 1, "the tiny target says the same to everything"
    samples = [Sample(g.prompt_ids, g.output_ids, best_tau(len(g.output_ids), BLOCK)) for g in plain]
    assert all(s.best == BLOCK for s in samples)

    small = overfit_run(run, samples, learning_rate=6e-3)
    steps, right = train_on(small, seconds=float("inf"), most_steps=3000)
    assert right == 1.0, f"{steps} steps, {right:.1%} of the slots right"
    spoken, _ = generate_speculative(
        run.target, decoding_model(small), small.config, prompts, max_new_tokens=TOKENS, batch_size=7
    )
    acceptance = summarise(spoken, BLOCK)
    assert acceptance.tau == BLOCK
    assert acceptance.tau_per_response == BLOCK
    assert acceptance.acceptance_by_position == (1.0,) * (BLOCK - 1)
    assert compare_lossless(plain, spoken).equal == SAMPLES
    for generation in spoken:
        assert generation.accept_lengths == (BLOCK,) * PASSES


def _without_eos(info):
    import dataclasses

    return dataclasses.replace(info, eos_ids=())
