"""``train``: a recipe becomes a run directory with a trained drafter, or continues one."""

from __future__ import annotations

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
from slipstream.training.checkpoint import TrainingState, latest_checkpoint, read_checkpoint, remove_leftovers
from slipstream.training.directory import RunDirectory
from slipstream.training.disk import require_room
from slipstream.training.heldout import heldout_prompts, overlap
from slipstream.training.loop import Trainer
from slipstream.training.metrics import last_line
from slipstream.training.optimizer import state_bytes
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
) -> RunSummary:
    """Train a drafter as the recipe says, into ``run.directory``, and return the summary. Call from the main thread.

    ``preflight`` is called with everything loaded, before step 0 and before the run directory is made; what it returns
    becomes ``preflight.json``. ``resume`` continues from the newest complete checkpoint and repeats an uninterrupted
    run to the bit on a CPU (with as many threads). ``loop`` is for benchmarks, which watch the steps or set the clock.

    Raises TrainingError (an existing directory, no room, a loss that is not finite), CheckpointError (nothing to
    resume, another identity, a full disk), the errors of target, data and drafter; and KeyboardInterrupt after SIGINT
    or SIGTERM, once a checkpoint is saved.
    """
    console = console or Console(highlight=False)

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    with RunDirectory(Path(recipe.run.directory)) as directory:
        state: TrainingState | None = None
        moments: dict[str, Tensor] = {}
        checkpoint: Path | None = None
        if resume:
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
            state, moments = read_checkpoint(checkpoint)
        else:
            directory.refuse_existing()
        expected = None if state is None or checkpoint is None else (state.identity, checkpoint)
        run = prepare(recipe, say=say, expected=expected)
        prompts = heldout_prompts(recipe, run.target)
        if (warning := overlap(recipe.data, run.target.tokenizer, run.target.info, run.dataset)) is not None:
            say(warning)
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
        trainer = loop(run, directory, str(record["run_id"]), console, prompts)
        if state is not None and checkpoint is not None:
            trainer.restore(state, moments, checkpoint)
        trainer.run_to_end()
        return RunSummary(
            directory=directory.path,
            run_id=trainer.run_id,
            steps=trainer.step,
            elapsed=trainer.elapsed(),
            metrics=last_line(directory.metrics, "train") or {},
            evaluation=last_line(directory.metrics, "evaluation"),
            drafter=directory.drafter,
        )
