"""The training loop: whatever stops it, the newest checkpoint is whole and the metrics agree with it."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch

from slipstream.compilation import shapes_are_final, shapes_may_change, verify
from slipstream.compilation.bundle_live import first_step_report
from slipstream.drafter.anchors import sample_blocks
from slipstream.errors import DecodingError
from slipstream.training.heldout import decoded_acceptance
from slipstream.training.interrupt import Interrupts
from slipstream.training.metrics import MetricsLog, last_line
from slipstream.training.optimizer import schedule_factor
from slipstream.training.progress import TrainingDisplay, duration
from slipstream.training.ranks import Agreement
from slipstream.training.state import RunState
from slipstream.training.step import anchor_generator, training_step


class Trainer(RunState):
    """Trains one rank's part of a run. Not thread-safe. ``source`` may be replaced before ``run_to_end``.

    Every rank calls the same methods in the same order; the first one writes, shows and decodes for all.
    """

    # -- one optimizer step

    def train_step(self) -> None:
        """Run this rank's micro-batches of one optimizer step and update the weights, as all ranks do.

        No host sync but the source's own.
        """
        run, zero = self.run, torch.zeros((), device=self.run.device)
        loss_sum, weight_sum = zero, zero
        progress = self.progress(self.step + 1) if self._agreed is None else self._agreed.progress
        factor = schedule_factor(progress, self.settings)
        first = self.step * self.settings.accumulation
        for index in (first + place for place in run.micro_batches):
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
                    run.draft_model, run.ends.embed, run.ends.head_weight, features, blocks, run.attention,
                    settings=run.settings, head=run.ends.head,
                )  # fmt: skip
                result.loss_sum.backward()
                loss_sum = loss_sum + result.loss_sum.detach()
                weight_sum = weight_sum + result.weight_sum
                self.window.add_micro_batch(result)
        if self.ranks.size > 1:
            self.ranks.sum_gradients(self.updater.gradients())
            loss_sum, weight_sum = self.ranks.sum(torch.stack([loss_sum.double(), weight_sum.double()])).unbind()
        norm = self.updater.apply(step=self.step, factor=factor, loss_sum=loss_sum, weight_sum=weight_sum)
        self.window.add_step(norm, weight_sum)
        self._factor = factor
        self.step += 1

    def _agree(self, interrupted: bool) -> Agreement:
        """Settle with all ranks whether to go on, and how far the next step is. The first rank's clock decides."""
        self._agreed = self.ranks.agree(
            stop=interrupted, progress=self.progress(self.step + 1), finished=self.finished()
        )
        return self._agreed

    # -- the loop

    def run_to_end(self) -> None:
        """Train until the steps or the minutes are used up, and write ``drafter/``."""
        log = None
        if self.ranks.first:
            log = MetricsLog(self.directory.path, self.run_id, resumed_from=self.resumed_from)
        self._began = time.monotonic()
        self._reported = (self._began, self.source.tokens)
        display = TrainingDisplay(self.console, steps=self.run.steps, start=self.progress(self.step))
        try:
            with Interrupts() as interrupts, display:
                last = self._agree(False).finished
                if self.resumed_from is not None:
                    self._finish_what_was_cut(log, display, last)
                verify()
                while not last:
                    self.train_step()
                    shapes_are_final(strict=self.run.recipe.run.strict)
                    if (told := first_step_report()) is not None:
                        display.say(told)
                    agreed = self._agree(interrupts.received is not None)
                    last = agreed.finished
                    display.advance(self.step, self.progress(self.step))
                    self._after_step(log, display, last)
                    if agreed.stop and not last:
                        path = self.save(log)
                        self._say(
                            f"stopped by {interrupts.received or 'a signal to another rank'} after step {self.step}; "
                            f"saved {path}; continue with --resume"
                        )
                        raise KeyboardInterrupt
            if log is not None:
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
            self.source.close(failing=sys.exc_info()[0] is not None)
            if log is not None:
                log.close()

    def _finish_what_was_cut(self, log: MetricsLog | None, display: TrainingDisplay, last: bool) -> None:
        """Write and decode what a run that was killed behind its newest checkpoint would have."""
        if last:
            self._write_drafter()
        if not self._evaluation_due(last):
            return

        def evaluated() -> bool:
            done = last_line(self.directory.metrics, "evaluation")
            return done is not None and bool(done["step"] >= self.step)

        if not self.ranks.on_first(evaluated):
            self._evaluate(log, display)

    def _due(self, every: int, last: bool) -> bool:
        return last or (every > 0 and self.step % every == 0)

    def _evaluation_due(self, last: bool) -> bool:
        return bool(self.prompts) and self._due(self.settings.evaluate_every, last)

    def _after_step(self, log: MetricsLog | None, display: TrainingDisplay, last: bool) -> None:
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

    def _report(self, log: MetricsLog | None, display: TrainingDisplay) -> None:
        self.window.gather(self.ranks)
        values = self.window.report()
        now, (then, before) = time.monotonic(), self._reported
        span = max(now - then, 1e-9)
        target, waited, tokens = self.ranks.sum_numbers(self.source.seconds(), self.source.waited(), self.source.tokens)
        target, waited = target / self.ranks.size, waited / self.ranks.size
        self._reported = (now, round(tokens))
        used = self.settings.rows * self.settings.accumulation * self.step / len(self.run.dataset)
        values |= {
            "learning_rate": self.settings.learning_rate * self._factor,
            "tokens_per_second": (tokens - before) / span,
            "target_share_of_time": min(target / span, 1.0),
            "tokens": round(tokens),
            "epoch": used,
            "elapsed": self.elapsed(),
        }
        if self.settings.optimizer == "muon":
            values["muon_learning_rate"] = self.settings.muon_learning_rate * self._factor
        if self.source.apart:  # one device for both is never both busy and idle
            values["drafter_share_of_time"] = max(1.0 - waited / span, 0.0)
        if log is not None:
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

    def _evaluate(self, log: MetricsLog | None, display: TrainingDisplay) -> None:
        start, elapsed = time.monotonic(), self.elapsed()
        values = self.ranks.on_first(self._decode)
        values["elapsed"] = elapsed
        if log is not None:
            log.write("evaluation", self.step, values)
        if "failed" in values:  # a measurement that failed must not end a training run; it is said and logged
            display.say(f"step {self.step}: decoded acceptance could not be measured: {values['failed']}")
            return
        self._lossy = values["lossy"]
        display.say(
            f"step {self.step}: decoded acceptance {values['decoded_acceptance_length']:.3f} on {values['prompts']} "
            f"held-out prompts; {self._losslessness(values)}"
        )
        pause = time.monotonic() - start
        self._began += pause
        self._reported = (self._reported[0] + pause, self._reported[1])

    def _decode(self) -> dict[str, Any]:
        """Decode the held-out prompts with the checkpoint of this step; ``failed`` where that is not possible."""
        drafter = self.directory.checkpoints / f"step-{self.step}" / "drafter"
        try:
            with self.source.paused():
                return decoded_acceptance(self.run.recipe, self.run.target, drafter, self.prompts)
        except DecodingError as error:
            return {"failed": str(error)}
