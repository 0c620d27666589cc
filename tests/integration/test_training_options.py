"""Runs with another optimizer, soft labels or short blocks: they learn, go on to the bit, and are not mixed up."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slipstream.errors import CheckpointError
from support.tiny_run import lines, make_inputs, quiet_train, tiny_recipe

OPTIONS: dict[str, dict[str, Any]] = {
    "muon": {"training__optimizer": "muon", "training__weight_decay": 0.01},
    "soft": {"training__labels": "soft", "training__loss": "dpace"},
    "short": {"training__short_blocks": 0.5},
    "both": {"training__labels": "soft", "training__soft_share": 0.5, "training__optimizer": "muon"},
}
# Two micro-batches and two draws a step, and a metric window that the checkpoint cuts in half.
STEPS: dict[str, Any] = {
    "training__steps": 10,
    "training__accumulation": 2,
    "training__draws_per_prefill": 2,
    "training__log_every": 2,
    "training__checkpoint_every": 5,
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("options"))


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_ten_steps_equal_five_a_resume_and_five_more(root: Path, tmp_path: Path, option: str, precision: str):
    settings = {**STEPS, **OPTIONS[option], "training__precision": precision, "target__dtype": precision}
    straight, again = tmp_path / "straight", tmp_path / "again"
    quiet_train(tiny_recipe(root, straight, **settings))
    shutil.copytree(straight, again)
    shutil.rmtree(again / "checkpoints/step-10")
    shutil.rmtree(again / "drafter")
    _, told = quiet_train(tiny_recipe(root, again, **settings), resume=True)
    assert "step-5: step 5" in told
    for file in ("drafter/model.safetensors", "optimizer.safetensors", "state.safetensors"):
        a, b = (load_file(run / "checkpoints/step-10" / file) for run in (straight, again))
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in a)
        assert all(value.dtype in (torch.float32, torch.float64, torch.uint8) for value in a.values())
    times = {"tokens_per_second", "target_share_of_time", "elapsed"}
    for one, two in zip(lines(straight), lines(again), strict=True):
        assert {k: v for k, v in one.items() if k not in times} == {k: v for k, v in two.items() if k not in times}


@pytest.mark.parametrize("option", OPTIONS)
def test_it_learns(root: Path, tmp_path: Path, option: str):
    settings = {**OPTIONS[option], "training__steps": 25, "training__learning_rate": 0.003}
    summary, _ = quiet_train(tiny_recipe(root, tmp_path / "run", **settings))
    rows = lines(summary.directory)
    losses = [row["loss"] for row in rows]
    # A target of random weights is sure of next to nothing: its distribution alone teaches little. AdamW with neither
    # option comes to 0.975.
    assert sum(losses[-5:]) < {"soft": 0.999, "short": 0.98}.get(option, 0.97) * sum(losses[:5])
    assert ("hard_loss" in rows[0]) == ("soft" in settings.values())


def test_muon_keeps_one_momentum_a_matrix_and_reports_both_rates(root: Path, tmp_path: Path):
    settings = {**OPTIONS["muon"], "training__steps": 4, "training__learning_rate": 0.001}
    summary, _ = quiet_train(tiny_recipe(root, tmp_path / "run", **settings))
    state = load_file(summary.directory / "checkpoints/step-4/optimizer.safetensors")
    weights = load_file(summary.directory / "checkpoints/step-4/drafter/model.safetensors")
    kinds = {name: {key.partition(".")[0] for key in state if key.partition(".")[2] == name} for name in weights}
    for name, weight in weights.items():
        assert kinds[name] == ({"momentum_buffer"} if weight.dim() == 2 else {"exp_avg", "exp_avg_sq", "step"})
    for row in lines(summary.directory):
        assert row["muon_learning_rate"] == pytest.approx(20 * row["learning_rate"])


@pytest.fixture(scope="module")
def finished(root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    room = tmp_path_factory.mktemp("finished")
    for option, settings in {"plain": {}, **OPTIONS}.items():
        quiet_train(tiny_recipe(root, room / option, training__steps=1, **settings))
    return {option: room / option for option in ("plain", *OPTIONS)}


@pytest.mark.parametrize(
    ("option", "change", "message"),
    [
        ("plain", {"training__optimizer": "muon"}, r"training\.optimizer = 'adamw', this run has 'muon'"),
        ("muon", {"training__optimizer": "adamw"}, r"training\.optimizer = 'muon', this run has 'adamw'"),
        ("muon", {"training__muon_momentum": 0.9}, r"training\.muon_momentum = 0\.95, this run has 0\.9"),
        ("muon", {"training__muon_learning_rate": 0.1}, r"training\.muon_learning_rate = 0\.02, this run has 0\.1"),
        ("plain", {"training__labels": "soft"}, r"training\.labels = 'hard', this run has 'soft'"),
        ("soft", {"training__labels": "hard"}, r"training\.labels = 'soft', this run has 'hard'"),
        ("short", {"training__short_blocks": 0.25}, r"training\.short_blocks = 0\.5, this run has 0\.25"),
        ("plain", {"training__short_blocks": 0.5}, r"training\.short_blocks"),
        ("short", {"training__short_blocks": 0.0}, r"training\.short_blocks"),
        ("both", {"training__soft_share": 0.25}, r"training\.soft_share = 0\.5, this run has 0\.25"),
    ],
)
def test_a_resume_with_another_option_is_refused(
    root: Path, finished: dict[str, Path], option: str, change: dict[str, Any], message: str
):
    settings = {"training__steps": 1, **OPTIONS.get(option, {}), **change}
    with pytest.raises(CheckpointError, match=message) as caught:
        quiet_train(tiny_recipe(root, finished[option], **settings), resume=True)
    assert "\n" not in str(caught.value)


def test_what_an_option_does_not_read_may_change(root: Path, finished: dict[str, Path]):
    unread = {"training__muon_learning_rate": 0.3, "training__soft_share": 0.5}
    recipe = tiny_recipe(root, finished["plain"], training__steps=1, **unread)
    assert "resumed from" in quiet_train(recipe, resume=True)[1]
