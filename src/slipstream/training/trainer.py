"""``train``: a recipe becomes a run directory with a trained drafter, or continues one."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import Tensor

from slipstream.config import Recipe
from slipstream.errors import CheckpointError
from slipstream.provenance import write_json
from slipstream.topology import RankPlan
from slipstream.training.checkpoint import TrainingState, latest_checkpoint, read_checkpoint, remove_leftovers
from slipstream.training.directory import RunDirectory
from slipstream.training.disk import require_room
from slipstream.training.heldout import heldout_prompts, overlap
from slipstream.training.loop import Trainer
from slipstream.training.metrics import last_line
from slipstream.training.optimizer import state_bytes
from slipstream.training.ranks import Ranks
from slipstream.training.session import PreparedRun, prepare

Preflight = Callable[[PreparedRun], "dict[str, Any] | None"]


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """A finished run. ``metrics``: its last train line; ``evaluation``: its last evaluation line, or None.

    ``drafter``: directory of the trained drafter, float32. ``elapsed``: seconds of training over all sessions.
    """

    directory: Path
    run_id: str
    steps: int
    elapsed: float
    metrics: dict[str, Any]
    evaluation: dict[str, Any] | None
    drafter: Path


def train(
    recipe: Recipe,
    *,
    argv: Sequence[str] = (),
    resume: bool = False,
    console: Console | None = None,
    preflight: Preflight | None = None,
    loop: type[Trainer] = Trainer,
    ranks: Ranks | None = None,
    place: RankPlan | None = None,
) -> RunSummary:
    """Train a drafter as the recipe says, into ``run.directory``, and return the summary. Call from the main thread.

    ``preflight`` is called with everything loaded, before step 0 and before the run directory is made; what it returns
    becomes ``preflight.json``. ``resume`` continues from the newest complete checkpoint and repeats an uninterrupted
    run to the bit on a CPU (with as many threads). ``loop`` is for benchmarks, which watch the steps or set the clock.
    ``ranks`` and ``place``: this process among several, and its devices; every one of them calls this function with the
    same recipe. The run directory must be the same for all of them.

    Raises TrainingError (an existing directory, no room, a loss that is not finite), CheckpointError (nothing to
    resume, another identity, a full disk), PeerError (another rank has failed), the errors of target, data and drafter;
    and KeyboardInterrupt after SIGINT or SIGTERM, once a checkpoint is saved.
    """
    ranks = Ranks() if ranks is None else ranks
    if not ranks.first:
        console = Console(quiet=True)
    console = console or Console(highlight=False)

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    with RunDirectory(Path(recipe.run.directory)) as directory:
        checkpoint = ranks.on_first(lambda: _start_from(directory, resume, say))
        state: TrainingState | None = None
        moments: dict[str, Tensor] = {}
        if checkpoint is not None:
            state, moments = read_checkpoint(checkpoint)
        expected = None if state is None or checkpoint is None else (state.identity, checkpoint)
        run = prepare(recipe, say=say, expected=expected, place=place)
        prompts = heldout_prompts(recipe, run.target)
        if (warning := overlap(recipe.data, run.target.tokenizer, run.target.info, run.dataset)) is not None:
            say(warning)
        run_id = ranks.on_first(lambda: _claim(directory, run, recipe, argv, state, preflight))
        trainer = loop(run, directory, run_id, console, prompts, ranks)
        if state is not None and checkpoint is not None:
            trainer.restore(state, moments, checkpoint)
        if ranks.size > 1:
            for name, value in sorted(run.identity.items()):
                ranks.require_equal(name, str(value))
            ranks.require_equal("the drafter's first weights", _weights_digest(run))
        trainer.run_to_end()
        metrics, evaluation = ranks.on_first(
            lambda: (last_line(directory.metrics, "train"), last_line(directory.metrics, "evaluation"))
        )
        return RunSummary(
            directory=directory.path,
            run_id=trainer.run_id,
            steps=trainer.step,
            elapsed=trainer.elapsed(),
            metrics=metrics or {},
            evaluation=evaluation,
            drafter=directory.drafter,
        )


def _start_from(directory: RunDirectory, resume: bool, say: Callable[[str], None]) -> Path | None:
    """Return the checkpoint to resume, or None for a new run. Raises for a directory that fits neither."""
    if not resume:
        directory.refuse_existing()
        return None
    directory.require_existing()
    directory.lock()
    for name in remove_leftovers(directory.checkpoints):
        say(f"removed {name}, left by a save that was cut off")
    passed_over: list[str] = []
    checkpoint = latest_checkpoint(directory.checkpoints, passed_over.append)
    if checkpoint is None:
        why = f" ({'; '.join(passed_over)})" if passed_over else ""
        raise CheckpointError(
            f"{directory.checkpoints} holds no complete checkpoint{why}; start again with another run.directory"
        )
    for text in passed_over:
        say(f"{text}; going back to {checkpoint.name}")
    return checkpoint


def _claim(
    directory: RunDirectory,
    run: PreparedRun,
    recipe: Recipe,
    argv: Sequence[str],
    state: TrainingState | None,
    preflight: Preflight | None,
) -> str:
    """Check, then make or reopen the run directory; return the run's id. The first rank's work."""
    if state is None or run.steps is None or state.step < run.steps:
        shapes = [p.shape for p in run.draft_model.parameters()]
        require_room(directory.path, sum(map(math.prod, shapes)), state_bytes(shapes, recipe.training))
    report = preflight(run) if preflight is not None else None
    device = str(run.device)
    if state is None:
        record = directory.create(recipe, argv, device=device, identity=run.identity)
    else:
        record = directory.reopen(recipe, argv, device=device, step=state.step, identity=run.identity)
    if report is not None:
        write_json(directory.path / "preflight.json", report)
    return str(record["run_id"])


def _weights_digest(run: PreparedRun) -> str:
    """Return a digest of the drafter's weights. Waits for the device."""
    digest = hashlib.sha256()
    for name, parameter in sorted(run.draft_model.named_parameters()):
        digest.update(name.encode() + parameter.detach().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]
