"""Load target and drafter from disk and decode: the measurement itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.config import Recipe
from slipstream.errors import ConfigError, TargetError
from slipstream.evaluation.display import EvaluationDisplay

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from slipstream.data.pack import PackedDataset
    from slipstream.records import EvalResult


# Tokens that the bigram and trigram tables are counted on: dictionaries of about a gigabyte, counted in under a minute.
TABLE_TOKENS = 5_000_000


def evaluation_dtype(recipe: Recipe, device: torch.device) -> torch.dtype:
    """Return the target's dtype while decoding: on a CPU float32 unless set, since there greedy decoding is exact."""
    from slipstream.target.model import resolve_dtype

    setting = recipe.evaluation.dtype
    if setting == "auto":
        setting = recipe.target.dtype if device.type == "cuda" else "float32"
    return resolve_dtype(setting, device)


def evaluate_drafter(
    recipe: Recipe,
    directory: Path,
    *,
    device: torch.device,
    dtype: torch.dtype,
    trained_with: Mapping[str, str] | None = None,
    console: Console,
) -> EvalResult:
    """Load target and drafter and measure. The free baselines' tables are made of the recipe's training data.

    ``trained_with`` holds the digests of the target and tokenizer that the drafter learned with, where they are known;
    others are refused with TargetError. Held-out prompts that begin a training document are counted and told.
    """
    from slipstream.data.overlap import heldout_in_training, overlap_warning
    from slipstream.data.pack import build_dataset
    from slipstream.decoding.acceptance import evaluate
    from slipstream.drafter.store import load_drafter
    from slipstream.target.model import load_target
    from slipstream.training.heldout import read_prompts
    from slipstream.training.session import source_identity

    if not recipe.data.heldout:
        raise ConfigError("data.heldout is empty; name a file of prompts that are not trained on")
    draft_model, config = load_drafter(directory, device=device, dtype=dtype)
    target = load_target(recipe.target, device=device, dtype=dtype)
    try:
        require_same(trained_with or {}, source_identity(target), directory, recipe.target.path)
        prompts = read_prompts(recipe, target, recipe.evaluation.max_prompts)
        training: list[list[int]] = []
        details: dict[str, Any] = {"target_digest": target.info.digest}
        if recipe.data.train:
            dataset = build_dataset(recipe.data, target.tokenizer, stop_ids=target.info.eos_ids)
            training = table_documents(dataset, console)
            found = heldout_in_training(dataset, prompts)
            details["heldout_in_training"] = len(found)
            if found:
                console.print(overlap_warning(found, len(prompts)), markup=False, style="yellow", soft_wrap=True)
        with EvaluationDisplay(console) as display:
            result = evaluate(
                target,
                draft_model.eval(),
                config,
                prompts,
                recipe.evaluation,
                table_ids=training,
                seed=recipe.run.seed,
                progress=display.update,
            )
        return replace(result, details={**result.details, **details})
    finally:
        target.close()


def require_same(trained: Mapping[str, str], found: Mapping[str, Any], directory: Path, target: str) -> None:
    """Raise TargetError where the target at hand, or its tokenizer or chat template, is not the trained one."""
    for name, digest in trained.items():
        if digest != found[name]:
            what = "target" if name == "target.digest" else "tokenizer or chat template"
            raise TargetError(
                f"{directory} was trained with the {what} {digest[:12]}, and that of {target} is another "
                f"({found[name][:12]}); give the trained one, or a recipe with --drafter to compare on purpose"
            )


def table_documents(dataset: PackedDataset, console: Console, limit: int = TABLE_TOKENS) -> list[list[int]]:
    """Return the documents that the n-gram tables are counted on: in the order of the rows, up to ``limit`` tokens.

    The tables are dictionaries in memory; a whole large training set would not fit. A cut is said.
    """
    taken: list[list[int]] = []
    tokens = 0
    for ids, _ in dataset.documents():
        if taken and tokens + len(ids) > limit:
            console.print(
                f"n-gram tables are counted on the first {tokens:,} of {dataset.report.tokens:,} training tokens",
                markup=False,
                soft_wrap=True,
            )
            break
        taken.append(ids.tolist())
        tokens += len(ids)
    return taken
