"""Decoded acceptance on held-out prompts while training. It reads checkpoint files, never live weights."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from slipstream.config import DataConfig, Recipe
from slipstream.data.conversations import read_conversations
from slipstream.data.overlap import heldout_in_training, overlap_warning
from slipstream.data.render import Renderer
from slipstream.decoding.acceptance import evaluate
from slipstream.decoding.losslessness import faults
from slipstream.decoding.responses import check_prompts
from slipstream.drafter.store import load_drafter
from slipstream.errors import TrainingError

if TYPE_CHECKING:
    from slipstream.data.pack import PackedDataset
    from slipstream.target.model import Target, TargetInfo

# Held-out prompts that are looked for in the training data; more would cost every start some time.
_COMPARED_PROMPTS = 10_000


class Described(Protocol):
    """What prompts are rendered and checked with; a ``Target`` is one."""

    @property
    def tokenizer(self) -> Any: ...

    @property
    def info(self) -> TargetInfo: ...


def heldout_prompts(recipe: Recipe, target: Described) -> list[list[int]]:
    """Return the ids of the first ``training.evaluate_prompts`` held-out prompts; there may be none.

    They are checked now, not hours later. Raises DataError, DecodingError, and TrainingError where ``evaluate_every``
    asks for an evaluation that has no prompts.
    """
    training, data = recipe.training, recipe.data
    if training.evaluate_every > 0 and not (data.heldout and training.evaluate_prompts > 0):
        raise TrainingError(
            f"training.evaluate_every is {training.evaluate_every}, but there are no held-out prompts; "
            "set data.heldout and training.evaluate_prompts, or evaluate_every = 0"
        )
    if not data.heldout or training.evaluate_prompts < 1:
        return []
    return read_prompts(recipe, target, training.evaluate_prompts)


def read_prompts(recipe: Recipe, target: Described, limit: int) -> list[list[int]]:
    """Return the ids of the first ``limit`` (0: all) conversations of ``data.heldout``, as a server prefills them.

    They are checked now, not hours later: raises DataError, and DecodingError for a prompt that leaves no room for
    ``evaluation.max_new_tokens``.
    """
    data = recipe.data
    renderer = Renderer(target.tokenizer, data=data, stop_ids=target.info.eos_ids)
    found = read_conversations(data.heldout, prompt_completion=data.prompt_completion, max_samples=limit)
    prompts = [renderer.prompt_ids(conversation) for conversation in found]
    check_prompts(
        prompts,
        target.info,
        max_new_tokens=recipe.evaluation.max_new_tokens,
        batch_size=recipe.evaluation.batch_size,
    )
    return prompts


def overlap(data: DataConfig, tokenizer: Any, info: TargetInfo, dataset: PackedDataset) -> str | None:
    """Return a warning if prompts of ``data.heldout`` also begin training documents, else None. Raises DataError."""
    if not data.heldout:
        return None
    renderer = Renderer(tokenizer, data=data, stop_ids=info.eos_ids)
    conversations = read_conversations(
        data.heldout, prompt_completion=data.prompt_completion, max_samples=_COMPARED_PROMPTS
    )
    prompts = [renderer.prompt_ids(conversation) for conversation in conversations]
    found = heldout_in_training(dataset, prompts)
    return overlap_warning(found, len(prompts)) if found else None


def decoded_acceptance(recipe: Recipe, target: Target, drafter: Path, prompts: list[list[int]]) -> dict[str, Any]:
    """Decode the prompts with the drafter in directory ``drafter``, in the target's dtype, and return the figures."""
    draft_model, config = load_drafter(drafter, device=target.device, dtype=target.dtype)
    settings = dataclasses.replace(recipe.evaluation, max_prompts=0)
    result = evaluate(target, draft_model.eval(), config, prompts, settings, seed=recipe.run.seed).as_json()
    return {
        "decoded_acceptance_length": result["tau"],
        "decoded_acceptance_length_per_response": result["tau_per_response"],
        "decoded_acceptance_by_position": result["acceptance_by_position"],
        "lossless_responses": result["lossless"]["responses"],
        "lossless_equal": result["lossless"]["equal"],
        "near_ties": result["near_ties"],
        "lossy": len(faults(result["lossless"]["first_differences"])) if settings.temperature == 0 else 0,
        "target_dtype": target.info.dtype,
        "speedup": result["speedup"],
        "prompts": result["prompts"],
    }
