"""Prewarming: nothing on a CPU; elsewhere the real step is compiled, bundled, and found by the run that follows."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from slipstream import prewarm as prewarming
from slipstream.compilation import bundle_live, first_call_alone, tuning_results
from slipstream.compilation.bundle import directory
from slipstream.compilation.guard import FirstCallAlone
from slipstream.drafter.attention import DenseAttention, masked_attention
from slipstream.errors import CompilationError, DecodingError, TrainingError
from slipstream.prewarm import prewarm, run_once, save, work_of
from slipstream.training import session
from slipstream.training.heldout import heldout_prompts
from slipstream.training.muon import MuonAdamW
from slipstream.training.session import prepare
from support.tiny_run import make_inputs, quiet_train, tiny_recipe


@pytest.fixture(autouse=True)
def _own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "slipstream"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    yield
    tuning_results.forget()
    bundle_live.first_step_report()


def quiet(**options: Any) -> Console:
    return Console(file=io.StringIO(), width=200, highlight=False)


def text(console: Console) -> str:
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


class CompiledDense(DenseAttention):
    """Stands in for flex attention, which a CPU has no backward of: compiled in the same way, forward and backward."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.compiled: FirstCallAlone = first_call_alone(masked_attention)

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.compiled(q, k, v, self._masks[self._config.window(layer)])
        return out


def test_on_a_cpu_there_is_nothing_to_do_and_nothing_is_loaded(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, tmp_path / "run", run__device="cpu")  # there is no target at all
    console = quiet()
    assert prewarm(recipe, console=console) == 0
    assert prewarm(recipe, console=console, devices=["cpu", "cpu"]) == 0
    assert text(console).count("nothing to do") == 2
    assert not directory().exists()


def test_a_device_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, tmp_path / "run")
    with pytest.raises(TrainingError, match="tpu"):
        prewarm(recipe, console=quiet(), devices=["tpu"])


def test_prepare_looks_up_the_key_that_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(session, "load_for_run", lambda work, device, *, say: asked.append(work))
    run = prepare(tiny_recipe(make_inputs(tmp_path), tmp_path / "run"), say=lambda _: None)
    assert asked == [work_of(run)]


def test_nothing_runs_on_the_target_before_the_bundle_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forward tunes kernels; the bundle would come too late for them."""
    done: list[str] = []
    call = torch.nn.Linear.forward

    def noted(self: Any, x: Any) -> Any:
        done.append("forward")
        return call(self, x)

    monkeypatch.setattr(torch.nn.Linear, "forward", noted)
    monkeypatch.setattr(session, "load_for_run", lambda *_, say: done.append("bundle"))
    prepare(tiny_recipe(make_inputs(tmp_path), tmp_path / "run"), say=lambda _: None)
    assert done[0] == "bundle"
    assert "forward" in done  # the target was asked whether it is causal all the same


def test_each_gpu_is_prewarmed_once_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(prewarming, "resolve_device", torch.device)

    class Run:
        def __init__(self, recipe: Any) -> None:
            self.recipe, self.name = recipe, recipe.run.device
            self.config = SimpleNamespace(target_layer_ids=(1,))
            self.target = SimpleNamespace(assert_causal=lambda: done.append(f"causal {self.name}"))

    def prepared(recipe: Any, *, say: Any) -> Run:
        done.append(f"prepare {recipe.run.device}")
        return Run(recipe)

    monkeypatch.setattr(prewarming, "prepare", prepared)
    monkeypatch.setattr(prewarming, "heldout_prompts", lambda recipe, target: [[1]])
    monkeypatch.setattr(prewarming, "build_reader", lambda *_: done.append("reader"))
    monkeypatch.setattr(prewarming, "run_once", lambda run, console, prompts: done.append(f"run {run.name}"))
    monkeypatch.setattr(prewarming, "save", lambda run, kernels: done.append(f"save {run.name}"))
    recipe = tiny_recipe(tmp_path, tmp_path / "run")
    names = ["cuda:0", "cuda:1", "cuda:0"]
    prewarm(recipe, console=quiet(), devices=names, preflight=lambda run: done.append(f"preflight {run.name}"))
    # Twice: what is tuned in the first pass is launched in the second.
    passes = ("prepare", "preflight", "run", "causal", "reader", "preflight", "run", "save")
    assert done == [what if what == "reader" else f"{what} cuda:{n}" for n in (0, 1) for what in passes]


def test_what_soft_labels_need_of_the_target_is_warmed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers after the last tap, in the reader's probe and in a step; and Muon's update."""
    recipe = tiny_recipe(make_inputs(tmp_path), tmp_path / "run", training__labels="soft", training__optimizer="muon")
    run = prepare(recipe, say=lambda _: None)
    calls: list[str] = []
    run.target.parts.norm.register_forward_hook(lambda *_: calls.append("norm"))
    genuine = MuonAdamW.step
    monkeypatch.setattr(MuonAdamW, "step", lambda self: calls.append("muon") or genuine(self))  # type: ignore[func-returns-value]
    run_once(run, quiet())
    assert calls == ["norm", "muon"]
    session.build_reader(run.recipe, run.config, run.target)
    assert calls.count("norm") > 1


def test_caches_that_are_switched_off_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = prepare(tiny_recipe(make_inputs(tmp_path), tmp_path / "run"), say=lambda _: None)
    run.attention.kind = "flex"
    monkeypatch.setattr(bundle_live, "save", lambda *_: None)
    with pytest.raises(CompilationError, match="FORCE_DISABLE_CACHES"):
        save(run)


def test_heldout_prompts_are_decoded_and_a_failure_costs_only_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []

    def decoded(recipe: Any, target: Any, drafter: Path, prompts: list[list[int]]) -> None:
        assert (drafter / "config.json").exists()
        asked.append((recipe.evaluation.max_new_tokens, len(prompts)))
        raise DecodingError("no")

    monkeypatch.setattr(prewarming, "decoded_acceptance", decoded)
    recipe = tiny_recipe(
        make_inputs(tmp_path), tmp_path / "run", data__heldout=tmp_path / "heldout.jsonl", evaluation__max_new_tokens=64
    )
    run, console = prepare(recipe, say=lambda _: None), quiet()
    prompts = heldout_prompts(run.recipe, run.target)
    run_once(run, console, prompts)
    assert asked == [(32, 2)]
    assert "could not be decoded (no)" in text(console)
    monkeypatch.undo()
    run_once(run, quiet(), prompts)


@pytest.mark.slow
def test_what_was_prewarmed_is_found_by_the_run_that_follows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        session, "build_attention", lambda _, config, rows, context, *rest, lengths: CompiledDense(config, context)
    )
    # A CPU that is treated as what it stands in for.
    monkeypatch.setattr(session, "load_for_run", bundle_live.load)
    recipe = tiny_recipe(make_inputs(tmp_path), tmp_path / "run", training__steps=2)
    run = prepare(recipe, say=lambda _: None)
    run_once(run, quiet())
    saved = save(run)
    assert saved is not None
    assert saved[1].about["graphs"] >= 2
    assert saved[1].about["target"] == run.target.info.name
    assert not (tmp_path / "run").exists()

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cold"))
    _, told = quiet_train(recipe)
    (line,) = [line for line in told.splitlines() if "graphs found" in line]
    assert f"{saved[1].about['graphs']} graphs found, 0 compiled anew" in line

    # Damaged: said, and the run goes on.
    saved[0].write_bytes(saved[0].read_bytes()[:-5])
    _, told = quiet_train(tiny_recipe(tmp_path, tmp_path / "other", training__steps=1))
    assert "is damaged" in told
