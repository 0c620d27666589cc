"""The trainer's part in compile safety: what it asks for and when, and that a failure of it ends the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.compilation import first_call_alone, late_compilations, shapes_may_change
from slipstream.errors import CompilationError
from slipstream.training import loop, session, state
from slipstream.training.checkpoint import damage, latest_checkpoint, read_checkpoint
from support.tiny_run import lines, make_inputs, quiet_train, tiny_recipe

NOT_HELD = "compilation under threads is not safe: hazard-x is not in force"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(autouse=True)
def _shapes_open():
    """A run that leaves the shapes final must fail its own test and no other."""
    shapes_may_change()
    yield
    shapes_may_change()


# -- prepare


@pytest.mark.parametrize("allowed", [False, True])
def test_preparing_installs_as_the_recipe_allows_before_anything_is_loaded_and_verifies_after_all_of_it(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: bool
):
    order: list[Any] = []
    monkeypatch.setattr(session, "install", lambda **given: order.append(("install", given)))
    monkeypatch.setattr(session, "verify", lambda: order.append("verify"))

    def note(name: str) -> None:
        real = getattr(session, name)

        def noted(*args: Any, **given: Any) -> Any:
            order.append(name)
            return real(*args, **given)

        monkeypatch.setattr(session, name, noted)

    for name in ("load_target", "build_drafter", "build_attention"):
        note(name)
    session.prepare(tiny_recipe(inputs, tmp_path / "run", run__allow_unknown_versions=allowed), say=lambda _: None)
    assert order[0] == ("install", {"allow_unknown": allowed})
    assert order[-1] == "verify", "what the loading has imported may have patched over it"
    assert {"load_target", "build_drafter", "build_attention"} <= set(order[1:-1])


@pytest.mark.parametrize("name", ["install", "verify"])
def test_what_is_not_safe_when_a_run_is_prepared_ends_it_before_there_is_a_run_directory(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
):
    def fails(**_: Any) -> None:
        raise CompilationError(NOT_HELD)

    monkeypatch.setattr(session, name, fails)
    with pytest.raises(CompilationError, match="hazard-x is not in force"):
        quiet_train(tiny_recipe(inputs, tmp_path / "run"))
    assert not (tmp_path / "run").exists()


# -- the loop


def test_what_is_not_safe_at_the_start_ends_the_run_before_its_first_step(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fails() -> None:
        raise CompilationError(NOT_HELD)

    def a_step(_: loop.Trainer) -> None:
        pytest.fail("a step was made")

    monkeypatch.setattr(loop, "verify", fails)
    monkeypatch.setattr(loop.Trainer, "train_step", a_step)
    with pytest.raises(CompilationError, match="hazard-x is not in force"):
        quiet_train(tiny_recipe(inputs, tmp_path / "run"))
    assert not (tmp_path / "run" / "drafter").exists()


def test_what_is_patched_over_while_a_run_goes_on_ends_it_before_the_next_save(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = tmp_path / "run"
    first = run / "checkpoints" / "step-1"

    train_step = loop.Trainer.train_step
    patched: list[str] = []

    def patched_over_in_the_second_step(trainer: loop.Trainer) -> None:
        train_step(trainer)
        if trainer.step == 2:
            patched.append("torch.fx.Tracer.trace")

    def verify() -> None:
        if patched:
            raise CompilationError(NOT_HELD)

    monkeypatch.setattr(loop.Trainer, "train_step", patched_over_in_the_second_step)
    monkeypatch.setattr(loop, "verify", verify)
    monkeypatch.setattr(state, "verify", verify)
    recipe = tiny_recipe(inputs, run, training__steps=3, training__checkpoint_every=1)
    with pytest.raises(CompilationError, match="hazard-x is not in force"):
        quiet_train(recipe)
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-1"], "nothing unsafe was saved"
    assert latest_checkpoint(run / "checkpoints") == first
    assert damage(first) is None
    assert read_checkpoint(first)[0].step == 1
    assert not (run / "drafter").exists()

    monkeypatch.undo()
    summary, told = quiet_train(recipe, resume=True)
    assert "resumed from" in told
    assert summary.steps == 3
    assert [line["step"] for line in lines(run)] == [1, 2, 3]


# -- final shapes


class Compiling(session.TargetSource):
    """Calls something compiled in each micro-batch, for these sizes in turn, and notes what was counted so far."""

    sizes: tuple[tuple[int, ...], ...]
    read_so_far: list[int]
    counted: list[dict[str, int]]
    double: Any

    def read(self, index: int) -> Any:
        self.read_so_far.append(index)
        for size in self.sizes[index]:
            self.double(torch.ones(size))
        self.counted.append(late_compilations())
        return super().read(index)


def compiling(monkeypatch: pytest.MonkeyPatch, *sizes: tuple[int, ...]) -> type[Compiling]:
    """Make runs read from such a source, one micro-batch a step."""

    class Source(Compiling):
        pass

    Source.sizes, Source.read_so_far, Source.counted = sizes, [], []
    Source.double = first_call_alone(lambda x: x * 2, backend=lambda graph, _: graph.forward)
    monkeypatch.setattr(session, "TargetSource", Source)
    return Source


def steps_recipe(inputs: Path, run: Path, steps: int, **changes: Any) -> Any:
    # One micro-batch a step: its index is the number of steps before it.
    return tiny_recipe(inputs, run, training__steps=steps, training__accumulation=1, **changes)


def test_a_signature_after_the_first_step_ends_a_strict_run_and_shapes_may_change_again(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # Two signatures within the first step are none too many.
    source = compiling(monkeypatch, (3, 5), (5, 3), (4,), (3,))
    with pytest.raises(CompilationError, match=r"new signature.*\[4\]"):
        quiet_train(steps_recipe(inputs, tmp_path / "run", 4, run__strict=True))
    assert source.read_so_far == [0, 1, 2]
    assert [line["step"] for line in lines(tmp_path / "run")] == [1, 2]
    # Whatever the process does next has shapes of its own.
    source.double(torch.ones(6))
    assert late_compilations() == {}


def test_a_signature_after_the_first_step_of_a_run_that_is_not_strict_is_counted_and_told(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    source = compiling(monkeypatch, (3, 5), (4,), (4, 6), (3,))
    with caplog.at_level("WARNING", logger="slipstream.compilation"):
        summary, _ = quiet_train(steps_recipe(inputs, tmp_path / "run", 4, run__strict=False))
    assert summary.steps == 4
    assert [counts.get(source.double.name, 0) for counts in source.counted] == [0, 1, 2, 2]
    assert [r.levelname for r in caplog.records if "meets a new signature" in r.getMessage()] == ["WARNING"] * 2


def test_a_run_that_ends_well_takes_back_that_its_shapes_are_final(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    first = compiling(monkeypatch, (3,), (3,))
    quiet_train(steps_recipe(inputs, tmp_path / "one", 2))
    first.double(torch.ones(4))
    # The next run of the process begins like any: its first step meets shapes that nobody has seen.
    second = compiling(monkeypatch, (7, 8), (8, 7))
    assert quiet_train(steps_recipe(inputs, tmp_path / "two", 2))[0].steps == 2
    assert second.read_so_far == [0, 1]
    assert late_compilations() == {}
