"""The training loop: whatever stops it, the newest checkpoint is whole and the metrics agree with it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from slipstream.compilation import shapes_are_final, shapes_may_change, verify
from slipstream.compilation.bundle_live import first_step_report
from slipstream.drafter.anchors import sample_blocks
from slipstream.drafter.store import load_drafter, save_drafter
from slipstream.errors import CheckpointError, DecodingError
from slipstream.training.checkpoint import TrainingState, save_checkpoint
from slipstream.training.directory import RunDirectory
from slipstream.training.fault import stop_at_fault
from slipstream.training.heldout import decoded_acceptance
from slipstream.training.interrupt import Interrupts
from slipstream.training.metrics import MetricsLog, MetricWindow, cut_after, last_line
from slipstream.training.optimizer import (
    Updater,
    assert_full_precision,
    build_optimizer,
    optimizer_tensors,
    restore_optimizer,
    schedule_factor,
)
from slipstream.training.progress import TrainingDisplay, duration
from slipstream.training.session import PreparedRun
from slipstream.training.source import FeatureSource, TargetSource
from slipstream.training.step import anchor_generator, training_step


class Trainer:
    """One run in this process. Not thread-safe. ``source`` may be replaced before ``run_to_end``."""

    def __init__(
        self, run: PreparedRun, directory: RunDirectory, run_id: str, console: Console, prompts: list[list[int]]
    ) -> None:
        self.run = run
        self.directory = directory
        self.run_id = run_id
        self.console = console
        self.prompts = prompts
        self.settings = run.recipe.training
        self.seed = run.recipe.run.seed
        self.source: FeatureSource = TargetSource(run.dataset, run.reader, rows=self.settings.rows, seed=self.seed)
        self.optimizer = build_optimizer(run.draft_model, self.settings)
        self.updater = Updater(self.optimizer, clip_norm=self.settings.clip_norm)
        self.window = MetricWindow(run.config.block_size, run.device, soft_labels=run.settings.soft_share > 0)
        self.step = 0
        self.resumed_from: int | None = None
        self._elapsed_before = 0.0
        self._began = time.monotonic()
        self._reported = (self._began, 0)  # time and tokens at the last report
        self._factor = 0.0  # share of the peak learning rates at the last step
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

    # -- one optimizer step

    def train_step(self) -> None:
        """Run the micro-batches of one optimizer step and update the weights. No host sync but the source's own."""
        run, zero = self.run, torch.zeros((), device=self.run.device)
        loss_sum, weight_sum = zero, zero
        factor = schedule_factor(self.progress(self.step + 1), self.settings)
        first = self.step * self.settings.accumulation
        for index in range(first, first + self.settings.accumulation):
            features = self.source.read(index)
            for draw in range(self.settings.draws_per_prefill):
                blocks = sample_blocks(
                    features.batch,
                    anchors=self.settings.anchors,
                    block_size=run.config.block_size,
                    mask_token_id=run.config.mask_token_id,
                    generator=anchor_generator(self.seed, index, draw),
                    short_share=self.settings.short_blocks,
                )
                run.attention.update(blocks.anchors, blocks.document_start, blocks.keep, blocks.length)
                result = training_step(
                    run.draft_model, run.target.embed, run.target.head_weight, features, blocks, run.attention,
                    settings=run.settings, head=run.target.head,
                )  # fmt: skip
                result.loss_sum.backward()
                loss_sum = loss_sum + result.loss_sum.detach()
                weight_sum = weight_sum + result.weight_sum
                self.window.add_micro_batch(result)
        norm = self.updater.apply(step=self.step, factor=factor, loss_sum=loss_sum, weight_sum=weight_sum)
        self.window.add_step(norm, weight_sum)
        self._factor = factor
        self.step += 1

    # -- state

    def state(self) -> TrainingState:
        """Return where the run stands, for a checkpoint."""
        tensors = {**self.window.tensors(), "rng.cpu": torch.get_rng_state()}
        if self.run.device.type == "cuda":
            tensors["rng.cuda"] = torch.cuda.get_rng_state(self.run.device)
        return TrainingState(
            step=self.step,
            elapsed=self.elapsed(),
            tokens=self.source.tokens,
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
        self.window.restore(state.tensors)
        torch.set_rng_state(state.tensors["rng.cpu"])
        if "rng.cuda" in state.tensors and self.run.device.type == "cuda":
            torch.cuda.set_rng_state(state.tensors["rng.cuda"], self.run.device)
        self.step = self.resumed_from = state.step
        self.source.tokens = state.tokens
        self._elapsed_before = state.elapsed
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
        fault = self.updater.fault()
        if fault is not None:
            raise stop_at_fault(self.run, self.optimizer, fault, self.state(), self.directory.path)

    def save(self, log: MetricsLog) -> Path:
        """Write a checkpoint of this step. The metrics before it reach the disk first."""
        self.check_fault()
        verify()
        log.sync()
        return save_checkpoint(
            self.directory.checkpoints,
            self.state(),
            write_drafter=lambda path: save_drafter(self.run.draft_model, self.run.config, path, dtype=torch.float32),
            optimizer=optimizer_tensors(self.run.draft_model, self.optimizer),
            keep=self.settings.keep_checkpoints,
        )

    # -- the loop

    def run_to_end(self) -> None:
        """Train until the steps or the minutes are used up, and write ``drafter/``."""
        log = MetricsLog(self.directory.path, self.run_id, resumed_from=self.resumed_from)
        self._began = time.monotonic()
        self._reported = (self._began, self.source.tokens)
        display = TrainingDisplay(self.console, steps=self.run.steps, start=self.progress(self.step))
        try:
            with Interrupts() as interrupts, display:
                if self.resumed_from is not None and self.finished():
                    self._write_drafter()
                if self.resumed_from is not None and self._evaluation_due(self.finished()):
                    done = last_line(self.directory.metrics, "evaluation")
                    if done is None or done["step"] < self.step:  # killed between this checkpoint and its evaluation
                        self._evaluate(log, display)
                last = self.finished()
                verify()
                while not last:
                    self.train_step()
                    shapes_are_final(strict=self.run.recipe.run.strict)
                    if (told := first_step_report()) is not None:
                        display.say(told)
                    last = self.finished()
                    display.advance(self.step, self.progress(self.step))
                    self._after_step(log, display, last)
                    if interrupts.received and not last:
                        path = self.save(log)
                        self._say(
                            f"stopped by {interrupts.received} after step {self.step}; saved {path}; "
                            "continue with --resume"
                        )
                        raise KeyboardInterrupt
            log.sync()
            self._say(f"drafter after {self.step} steps, {duration(self.elapsed())}: {self.directory.drafter}")
            if self._lossy:
                raise DecodingError(
                    f"training is complete, but decoding is not lossless: {self._lossy} held-out responses part from "
                    "plain decoding where the target has no near tie; this is a fault of the decoding, not of the "
                    "drafter: do not trust the decoded acceptance, and report it"
                )
        finally:
            shapes_may_change()
            log.close()

    def _due(self, every: int, last: bool) -> bool:
        return last or (every > 0 and self.step % every == 0)

    def _evaluation_due(self, last: bool) -> bool:
        return bool(self.prompts) and self._due(self.settings.evaluate_every, last)

    def _after_step(self, log: MetricsLog, display: TrainingDisplay, last: bool) -> None:
        """Report, save and evaluate, where due: saved before evaluated, so that an evaluation can cost nothing."""
        if self._due(self.settings.log_every, last):
            self.check_fault()
            self._report(log, display)
        elif self.run.device.type == "cpu":  # looking costs nothing there
            self.check_fault()
        evaluation = self._evaluation_due(last)
        if evaluation or self._due(self.settings.checkpoint_every, last):
            self.save(log)
        if last:  # before the evaluation: whatever that meets, the trained drafter is there
            self._write_drafter()
        if evaluation:
            self._evaluate(log, display)

    def _write_drafter(self) -> None:
        save_drafter(self.run.draft_model, self.run.config, self.directory.drafter, dtype=torch.float32, overwrite=True)

    def _report(self, log: MetricsLog, display: TrainingDisplay) -> None:
        values = self.window.report()
        target = self.source.seconds()
        now, (then, tokens) = time.monotonic(), self._reported
        span = max(now - then, 1e-9)
        self._reported = (now, self.source.tokens)
        used = self.settings.rows * self.settings.accumulation * self.step / len(self.run.dataset)
        values |= {
            "learning_rate": self.settings.learning_rate * self._factor,
            "tokens_per_second": (self.source.tokens - tokens) / span,
            "target_share_of_time": min(target / span, 1.0),
            "tokens": self.source.tokens,
            "epoch": used,
            "elapsed": self.elapsed(),
        }
        if self.settings.optimizer == "muon":
            values["muon_learning_rate"] = self.settings.muon_learning_rate * self._factor
        log.write("train", self.step, values)
        display.report(self.step, values)

    @staticmethod
    def _losslessness(values: dict[str, Any]) -> str:
        """Say how greedy output compares with plain decoding: below float32 a near tie may fall either way."""
        equal, responses, ties = (values[name] for name in ("lossless_equal", "lossless_responses", "near_ties"))
        text = f"lossless on {equal} of {responses}"
        if values["lossy"]:
            return f"NOT {text}: {values['lossy']} part from plain decoding at no near tie, a fault of the decoding"
        return text if equal == responses else f"{text}, {ties} parted at a near tie in {values['target_dtype']}"

    def _evaluate(self, log: MetricsLog, display: TrainingDisplay) -> None:
        start, elapsed = time.monotonic(), self.elapsed()
        drafter = self.directory.checkpoints / f"step-{self.step}" / "drafter"
        try:
            values = decoded_acceptance(self.run.recipe, self.run.target, drafter, self.prompts)
        except DecodingError as error:  # a measurement that failed must not end a training run; it is said and logged
            log.write("evaluation", self.step, {"failed": str(error), "elapsed": elapsed})
            display.say(f"step {self.step}: decoded acceptance could not be measured: {error}")
            return
        values["elapsed"] = elapsed
        self._lossy = values["lossy"]
        log.write("evaluation", self.step, values)
        display.say(
            f"step {self.step}: decoded acceptance {values['decoded_acceptance_length']:.3f} on {values['prompts']} "
            f"held-out prompts; {self._losslessness(values)}"
        )
        pause = time.monotonic() - start
        self._began += pause
        self._reported = (self._reported[0] + pause, self._reported[1])
