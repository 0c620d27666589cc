"""What a run holds in one rank, its clock, and how it is saved and restored."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from slipstream.compilation import verify
from slipstream.drafter.store import load_drafter, save_drafter
from slipstream.errors import CheckpointError
from slipstream.training.checkpoint import TrainingState, save_checkpoint
from slipstream.training.directory import RunDirectory
from slipstream.training.fault import stop_at_fault
from slipstream.training.metrics import MetricsLog, MetricWindow, cut_after
from slipstream.training.optimizer import (
    Updater,
    assert_full_precision,
    build_optimizer,
    optimizer_tensors,
    restore_optimizer,
)
from slipstream.training.progress import duration
from slipstream.training.ranks import Agreement, Ranks
from slipstream.training.session import PreparedRun
from slipstream.training.source import FeatureSource


class RunState:
    """One rank's part of a run: what it trains with, where it stands, and how that is kept. Not thread-safe.

    Every rank calls the same methods in the same order; the first one writes and shows for all.
    """

    def __init__(
        self,
        run: PreparedRun,
        directory: RunDirectory,
        run_id: str,
        console: Console,
        prompts: list[list[int]],
        ranks: Ranks | None = None,
    ) -> None:
        self.run = run
        self.ranks = Ranks() if ranks is None else ranks
        self.directory = directory
        self.run_id = run_id
        self.console = console
        self.prompts = prompts
        self.settings = run.recipe.training
        self.seed = run.recipe.run.seed
        self.source: FeatureSource = run.source()
        self.optimizer = build_optimizer(run.draft_model, self.settings)
        self.updater = Updater(self.optimizer, clip_norm=self.settings.clip_norm)
        self.window = MetricWindow(run.config.block_size, run.device, soft_labels=run.settings.soft_share > 0)
        self.step = 0
        self.resumed_from: int | None = None
        self._elapsed_before = 0.0
        self._began = time.monotonic()
        self._reported = (self._began, 0)  # time and tokens at the last report
        self._factor = 0.0  # share of the peak learning rates at the last step
        self._agreed: Agreement | None = None  # of all ranks, after the last step
        self._lossy = 0  # responses of the newest evaluation that parted from plain decoding at no near tie
        # Nothing here draws from torch's own generator; seeded and restored all the same, for code that might.
        torch.manual_seed(self.seed)
        assert_full_precision(run.draft_model, self.optimizer)

    # -- time and schedule

    def elapsed(self) -> float:
        """Return the seconds of training so far, all sessions together; decoding held-out prompts is not training."""
        return self._elapsed_before + time.monotonic() - self._began

    def restart_clock(self) -> None:
        """Count the time from now: what went before, compiling or waiting for a device, was not training."""
        self._elapsed_before, self._began = 0.0, time.monotonic()
        self._reported = (self._began, self.source.tokens)

    def progress(self, step: int) -> float:
        """Return 0..1: the share of the steps or of the minutes, whichever is further."""
        by_steps = step / self.run.steps if self.run.steps is not None else 0.0
        limit = self.settings.max_minutes * 60
        return min(max(by_steps, self.elapsed() / limit if limit > 0 else 0.0), 1.0)

    def finished(self) -> bool:
        """Say whether the last step is done, or another one would overrun the time."""
        if self.run.steps is not None and self.step >= self.run.steps:
            return True
        if self.step == 0:
            return False  # a drafter that was never trained is of no use, however short the time
        limit = self.settings.max_minutes * 60
        here = self.step - (self.resumed_from or 0)
        mean = (time.monotonic() - self._began) / here if here else 0.0
        return limit > 0 and self.elapsed() + mean > limit

    # -- state

    def state(self) -> TrainingState:
        """Return where the run stands, for a checkpoint; called by all ranks, the first one's is whole."""
        self.window.gather(self.ranks)
        tensors = {**self.window.tensors(), "rng.cpu": torch.get_rng_state()}
        if self.run.device.type == "cuda":
            tensors["rng.cuda"] = torch.cuda.get_rng_state(self.run.device)
        return TrainingState(
            step=self.step,
            elapsed=self.elapsed(),
            tokens=round(self.ranks.sum_numbers(self.source.tokens)[0]),
            run_id=self.run_id,
            identity=self.run.identity,
            tensors=tensors,
        )

    def restore(self, state: TrainingState, moments: dict[str, Tensor], checkpoint: Path) -> None:
        """Take over a checkpoint: weights, optimizer state, schedule, generators, data position, metrics."""
        saved, _ = load_drafter(checkpoint / "drafter", device=self.run.device, dtype=None)
        with torch.no_grad():
            for name, parameter in saved.named_parameters():
                if parameter.dtype != torch.float32:
                    raise CheckpointError(
                        f"{checkpoint}: {name} is {parameter.dtype}; a checkpoint's weights are float32"
                    )
            self.run.draft_model.load_state_dict(saved.state_dict())
        restore_optimizer(self.run.draft_model, self.optimizer, moments)
        assert_full_precision(self.run.draft_model, self.optimizer)
        if self.ranks.first:  # the others' sums are in the first one's
            self.window.restore(state.tensors)
        torch.set_rng_state(state.tensors["rng.cpu"])
        if "rng.cuda" in state.tensors and self.run.device.type == "cuda":
            torch.cuda.set_rng_state(state.tensors["rng.cuda"], self.run.device)
        self.step = self.resumed_from = state.step
        self.source.tokens = state.tokens if self.ranks.first else 0
        self._elapsed_before = state.elapsed
        if not self.ranks.first:
            return
        gone = state.step > 0 and not self.directory.metrics.exists()
        cut = cut_after(self.directory.metrics, state.step)
        self._say(f"resumed from {checkpoint}: step {state.step}, {duration(state.elapsed)} of training so far")
        if gone:
            self._say(
                f"{self.directory.metrics} is gone: the lines up to step {state.step} are lost, the weights are not; "
                "a new file begins here"
            )
        if cut:
            self._say(
                f"{cut} metrics lines after step {state.step} moved to metrics.discarded.jsonl; they are run again"
            )

    def _say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def check_fault(self) -> None:
        """Raise TrainingError, with everything saved, if some step was not finite. Waits for the device."""
        fault = self.updater.fault()  # the same on all ranks, as the sums are that it is read from
        if fault is None:
            return
        state = self.state()

        def stop() -> None:
            with self.source.paused():
                raise stop_at_fault(self.run, self.optimizer, fault, state, self.directory.path)

        self.ranks.on_first(stop)

    def save(self, log: MetricsLog | None) -> Path:
        """Write a checkpoint of this step. The metrics before it reach the disk first."""
        self.check_fault()
        verify()
        state = self.state()

        def write() -> Path:
            if log is not None:
                log.sync()
            return save_checkpoint(
                self.directory.checkpoints,
                state,
                write_drafter=lambda path: save_drafter(
                    self.run.draft_model, self.run.config, path, dtype=torch.float32
                ),
                optimizer=optimizer_tensors(self.run.draft_model, self.optimizer),
                keep=self.settings.keep_checkpoints,
            )

        return self.ranks.on_first(write)

    def _write_drafter(self) -> None:
        self.ranks.on_first(
            lambda: save_drafter(
                self.run.draft_model, self.run.config, self.directory.drafter, dtype=torch.float32, overwrite=True
            )
        )
