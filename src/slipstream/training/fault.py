"""A loss or gradient that is not finite: keep what is needed to look at it, and stop."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slipstream.drafter.anchors import sample_blocks
from slipstream.drafter.store import save_drafter
from slipstream.errors import TrainingError
from slipstream.training.checkpoint import TrainingState, write_tree
from slipstream.training.optimizer import Fault, optimizer_tensors
from slipstream.training.source import TargetSource
from slipstream.training.step import anchor_generator, training_step

if TYPE_CHECKING:
    from slipstream.training.session import PreparedRun


def stop_at_fault(
    run: PreparedRun,
    optimizer: torch.optim.Optimizer,
    fault: Fault,
    state: TrainingState,
    directory: Path,
) -> TrainingError:
    """Save the step's batches, the weights and the optimizer state that met them; return the error that names them.

    The updates have been frozen since ``fault.step``, so what is in memory is what that step started from. Its batches
    are functions of their indices and are made again; each is run alone, to name those whose loss is not finite.
    """
    tensors: dict[str, Tensor] = {}
    guilty: list[int] = []
    training, seed = run.recipe.training, run.recipe.run.seed
    source = TargetSource(run.dataset, run.reader, rows=training.rows, seed=seed)
    for index in range(fault.step * training.accumulation, (fault.step + 1) * training.accumulation):
        features = source.read(index).to(run.device)
        for draw in range(training.draws_per_prefill):
            blocks = sample_blocks(
                features.batch,
                anchors=training.anchors,
                block_size=run.config.block_size,
                mask_token_id=run.config.mask_token_id,
                generator=anchor_generator(seed, index, draw),
                short_share=training.short_blocks,
            )
            run.attention.update(blocks.anchors, blocks.document_start, blocks.keep, blocks.length)
            with torch.no_grad():
                result = training_step(
                    run.draft_model, run.ends.embed, run.ends.head_weight, features, blocks, run.attention,
                    settings=run.settings, head=run.ends.head,
                )  # fmt: skip
            if not bool(torch.isfinite(result.loss_sum)) and index not in guilty:
                guilty.append(index)
            tensors[f"{index}.draw{draw}.anchors"] = blocks.anchors.cpu()
        for name in ("ids", "loss_mask", "document_ids", "positions"):
            tensors[f"{index}.{name}"] = getattr(features.batch, name).cpu()
    rate = "muon_learning_rate" if training.optimizer == "muon" else "learning_rate"
    number = fault.step + 1  # as metrics count: finished steps
    place, again = directory / f"not-finite-step-{number}", 1
    while place.exists():
        again += 1
        place = directory / f"not-finite-step-{number}-{again}"
    what = (
        f"the loss of micro-batch {', '.join(map(str, guilty))} is not finite"
        if guilty
        else f"the gradient is not finite (norm {fault.grad_norm}, loss {fault.loss})"
    )
    try:
        write_tree(
            place,
            dataclasses.replace(state, step=fault.step),
            write_drafter=lambda path: save_drafter(run.draft_model, run.config, path, dtype=torch.float32),
            optimizer=optimizer_tensors(run.draft_model, optimizer),
            extra={"batches": tensors},
        )
        saved = f"the batches, the weights and the optimizer state before it are in {place}"
    except Exception as error:  # a full disk must not hide why the run stopped
        saved = f"saving them to {place} failed: {error}"
    return TrainingError(
        f"step {number}: {what}; {saved}; look at those rows, or lower training.{rate} or training.clip_norm, in "
        "another run (drafter.warm_start takes a checkpoint's drafter)"
    )
