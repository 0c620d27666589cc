"""Training on a GPU: no host sync in a step, a fault that freezes on the device, and a resume that goes on."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from slipstream.training.directory import RunDirectory
from slipstream.training.loop import Trainer
from slipstream.training.muon import MuonAdamW, orthogonalise
from slipstream.training.optimizer import optimizer_tensors
from slipstream.training.session import prepare
from slipstream.training.trainer import train
from support.tiny_run import lines, make_inputs, tiny_recipe

pytestmark = pytest.mark.gpu

SETTINGS: dict[str, Any] = {
    "run__device": "cuda",
    "training__precision": "bfloat16",
    "target__dtype": "bfloat16",
    "training__accumulation": 2,
    "training__draws_per_prefill": 2,
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("gpu"))


@pytest.fixture(params=[{}, {"training__optimizer": "muon", "training__labels": "soft"}], ids=["plain", "options"])
def trainer(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Trainer:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    run = prepare(tiny_recipe(root, tmp_path / "run", **SETTINGS, **request.param), say=lambda _: None)
    assert run.attention.kind == "flex"
    return Trainer(run, RunDirectory(tmp_path / "run"), "r", Console(file=io.StringIO()), [])


def test_a_step_does_not_wait_for_the_gpu(trainer: Trainer):
    """Features are read before; then anchors, drafter, loss, backward, clipping and update run without a sync."""
    trainer.train_step()  # compiles
    read = trainer.source.read
    ahead = {index: read(index) for index in range(2, 6)}
    trainer.source.read = lambda index: ahead[index]  # type: ignore[method-assign]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        trainer.train_step()
        trainer.train_step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert trainer.updater.fault() is None
    assert trainer.window.report()["loss"] > 0


def test_a_fault_freezes_the_weights_until_it_is_read(trainer: Trainer):
    trainer.train_step()
    model, optimizer = trainer.run.draft_model, trainer.optimizer
    held = [*model.parameters(), *optimizer_tensors(model, optimizer).values()]
    before = [tensor.detach().clone() for tensor in held]
    read = trainer.source.read

    def poisoned(index: int) -> Any:
        found = read(index)
        if index == 3:
            found.features[0, 0] = float("nan")
        return found

    trainer.source.read = poisoned  # type: ignore[method-assign]
    for _ in range(3):
        trainer.train_step()
    assert all(torch.equal(new, old) for new, old in zip(held, before, strict=True))
    fault = trainer.updater.fault()
    assert fault is not None
    assert fault.step == 1


def test_muon_is_orthogonalised_in_bfloat16_and_near_float32(trainer: Trainer):
    draw = torch.randn(3, 96, 64, generator=torch.Generator().manual_seed(0))
    expected = orthogonalise(draw)
    found = orthogonalise(draw.cuda().bfloat16())
    assert found.dtype == torch.bfloat16
    assert bool(found.isfinite().all())
    apart = (found.float().cpu() - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)
    assert float(apart.max()) < 0.05
    if isinstance(trainer.optimizer, MuonAdamW):
        assert trainer.optimizer.precision == torch.bfloat16


def test_train_and_resume(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    recipe = tiny_recipe(root, tmp_path / "run", data__heldout=root / "heldout.jsonl", training__steps=3, **SETTINGS)
    console = Console(file=io.StringIO())
    summary = train(recipe, console=console)
    again = train(recipe, console=console, resume=True)
    assert again.steps == summary.steps == 3
    assert [row["step"] for row in lines(tmp_path / "run")] == [1, 2, 3]
    assert summary.evaluation is not None
    assert summary.evaluation["decoded_acceptance_length"] >= 1
