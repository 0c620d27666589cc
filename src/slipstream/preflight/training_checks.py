"""``norms-move``, ``exact-resume``: the update reaches every weight in float32, and a resumed run is the same run."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from slipstream.errors import CheckpointError, TrainingError
from slipstream.preflight.report import CheckFailure
from slipstream.preflight.subject import DOCUMENTS, TOKENS, Subject, fresh_drafter, reduced_run
from slipstream.training.checkpoint import latest_checkpoint, read_checkpoint
from slipstream.training.directory import RunDirectory
from slipstream.training.loop import Trainer
from slipstream.training.metrics import MetricsLog
from slipstream.training.optimizer import optimizer_tensors
from slipstream.training.session import PreparedRun

STEPS = 4
_DRAWS = 3  # numbers that modelling code might draw from torch's own generator


def _small_run(subject: Subject) -> PreparedRun:
    """Return four steps of the run on its slice, two documents a row, with the recipe's own optimisation settings."""
    training = subject.run.recipe.training
    return reduced_run(
        subject.run,
        subject.documents,
        row_length=2 * TOKENS,
        steps=STEPS,
        max_minutes=0.0,
        rows=1,
        anchors=DOCUMENTS,
        accumulation=min(training.accumulation, 2),
        draws_per_prefill=min(training.draws_per_prefill, 2),
    )


def _trainer(run: PreparedRun, directory: RunDirectory) -> Trainer:
    return Trainer(run, directory, "preflight", Console(quiet=True), [])


def norms_move(subject: Subject) -> str:
    """After a few steps every tensor has moved, norms included; weights and moments are float32."""
    run = _small_run(subject)
    with tempfile.TemporaryDirectory(prefix="slipstream-preflight-") as room:
        try:
            trainer = _trainer(run, RunDirectory(Path(room) / "run"))
        except TrainingError as error:
            raise CheckFailure(f"{error}; the recipe's precision is that of the matmuls only") from None
        before = {name: p.detach().clone() for name, p in run.draft_model.named_parameters()}
        _check_precision(run, trainer)
        for _ in range(STEPS):
            trainer.train_step()
        trainer.check_fault()
        _check_precision(run, trainer)
    still = [name for name, p in run.draft_model.named_parameters() if torch.equal(p.detach(), before[name])]
    if still:
        raise CheckFailure(
            f"{still[0]} ({len(still)} of {len(before)} tensors) did not move in {STEPS} steps at learning rate "
            f"{run.recipe.training.learning_rate:g}: it has no gradient, or its dtype rounds the update away"
        )
    norms = [name for name, p in run.draft_model.named_parameters() if p.dim() < 2]
    least = min(float((run.draft_model.get_parameter(n).detach() - before[n]).abs().max()) for n in norms)
    return (
        f"{len(norms)} norms and {len(before) - len(norms)} matrices moved in {STEPS} steps (norms by {least:.1e} "
        "or more), all float32"
    )


def _check_precision(run: PreparedRun, trainer: Trainer) -> None:
    tensors = {**dict(run.draft_model.named_parameters()), **optimizer_tensors(run.draft_model, trainer.optimizer)}
    for name, tensor in tensors.items():
        if tensor.dtype != torch.float32:
            raise CheckFailure(
                f"{name} is {str(tensor.dtype).removeprefix('torch.')}; master weights and moments must be float32"
            )


def _everything(trainer: Trainer) -> dict[str, Tensor]:
    """Return all that a resume has to bring back: weights, moments, metric window, generators."""
    model = trainer.run.draft_model
    weights = {f"weight {name}": p.detach().clone() for name, p in model.named_parameters()}
    moments = {f"moment {k}": v.clone() for k, v in optimizer_tensors(model, trainer.optimizer).items()}
    state = trainer.state()
    return {**weights, **moments, **{f"state {k}": v.clone() for k, v in state.tensors.items()}}


def exact_resume(subject: Subject) -> str:
    """Four steps equal two, a save, another process's memory, a resume and two: to the bit on a CPU."""
    run = _small_run(subject)
    half = STEPS // 2
    seed = run.recipe.run.seed
    with tempfile.TemporaryDirectory(prefix="slipstream-preflight-") as room:
        straight = _trainer(run, RunDirectory(Path(room) / "straight"))
        torch.rand(_DRAWS)
        for _ in range(STEPS):
            straight.train_step()
        straight.check_fault()
        expected = _everything(straight)
        del straight

        first = dataclasses.replace(run, draft_model=fresh_drafter(run, run.config, seed))
        with RunDirectory(Path(room) / "run") as directory:
            directory.create(run.recipe, [], device=str(run.device))
            trainer = _trainer(first, directory)
            torch.rand(_DRAWS)
            for _ in range(half):
                trainer.train_step()
            log = MetricsLog(directory.path, "preflight")
            try:
                trainer.save(log)
            finally:
                log.close()
            checkpoint = latest_checkpoint(directory.checkpoints)
            if checkpoint is None:
                raise CheckFailure("the checkpoint that was saved is not found, or not trusted")
            # What another process would have: other weights, other generators, an empty optimizer.
            second = dataclasses.replace(run, draft_model=fresh_drafter(run, run.config, seed + 1))
            trainer = _trainer(second, directory)
            try:
                trainer.restore(*read_checkpoint(checkpoint), checkpoint)
            except (CheckpointError, TrainingError) as error:
                raise CheckFailure(f"the checkpoint that was saved cannot be resumed: {error}") from None
            if trainer.step != half:
                raise CheckFailure(
                    f"a resume after step {half} goes on at step {trainer.step}; data position and schedule would "
                    "be off"
                )
            for _ in range(STEPS - half):
                trainer.train_step()
            trainer.check_fault()
        return _compare(expected, _everything(trainer), exact=run.device.type == "cpu")


def _compare(expected: dict[str, Tensor], given: dict[str, Tensor], *, exact: bool) -> str:
    """Compare everything; on a GPU, where sums may be reordered, weights may differ in the last digits."""
    if set(expected) != set(given):
        raise CheckFailure(
            f"a resumed run lacks or adds {sorted(set(expected) ^ set(given))[0]}; it must restore everything"
        )
    worst = 0.0
    for name, value in expected.items():
        other = given[name]
        if torch.equal(value, other):
            continue
        apart = float((value.double() - other.double()).abs().max())
        limit = 1e-3 * max(float(value.double().abs().max()), 1e-6)
        if exact or name.startswith("state rng") or not apart <= limit:
            raise CheckFailure(
                f"{STEPS} steps and {STEPS // 2} + resume + {STEPS - STEPS // 2} differ in {name} by {apart:.3g}: "
                "the checkpoint "
                "does not hold everything, or the order of data or anchors depends on more than seed and index"
            )
        worst = max(worst, apart)
    what = "to the bit" if worst == 0 else f"within {worst:.1e} (this device reorders sums)"
    return f"{STEPS} steps = {STEPS // 2} + resume + {STEPS - STEPS // 2} {what}, {len(expected)} tensors"
