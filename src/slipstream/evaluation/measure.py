"""Load target and drafter from disk and decode: the measurement itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.config import Recipe
from slipstream.errors import ConfigError, TargetError
from slipstream.evaluation.blocks import Split, check_block_sizes, prompts_to_read, split_prompts
from slipstream.evaluation.display import EvaluationDisplay, TrialDisplay, print_comparison

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from slipstream.data.pack import PackedDataset
    from slipstream.decoding.block_trial import BlockComparison
    from slipstream.drafter.config import DrafterConfig
    from slipstream.drafter.model import DraftModel
    from slipstream.records import EvalResult
    from slipstream.target.model import Target


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
    others are refused with TargetError. Held-out prompts that begin a training document are counted and told. Block
    sizes to compare are tried first, on other prompts where there are enough. Raises ConfigError for sizes that the
    drafter does not have, before anything else is loaded.
    """
    from slipstream.data.overlap import heldout_in_training, overlap_warning
    from slipstream.data.pack import build_dataset
    from slipstream.decoding.acceptance import evaluate
    from slipstream.decoding.equipment import equipped
    from slipstream.drafter.store import load_drafter
    from slipstream.target.model import load_target
    from slipstream.training.heldout import read_prompts
    from slipstream.training.session import source_identity

    if not recipe.data.heldout:
        raise ConfigError("data.heldout is empty; name a file of prompts that are not trained on")
    settings = recipe.evaluation
    draft_model, config = load_drafter(directory, device=device, dtype=dtype)
    check_block_sizes(settings, config.block_size)
    target = load_target(recipe.target, device=device, dtype=dtype)
    try:
        require_same(trained_with or {}, source_identity(target), directory, recipe.target.path)
        split = split_prompts(read_prompts(recipe, target, prompts_to_read(settings)), settings)
        training: list[list[int]] = []
        details: dict[str, Any] = {"target_digest": target.info.digest}
        if recipe.data.train:
            dataset = build_dataset(recipe.data, target.tokenizer, stop_ids=target.info.eos_ids)
            training = table_documents(dataset, console)
            found = heldout_in_training(dataset, split.measured)
            details["heldout_in_training"] = len(found)
            if found:
                told = overlap_warning(found, len(split.measured))
                console.print(told, markup=False, style="yellow", soft_wrap=True)
        block_size = settings.block_size or config.block_size
        details["block_size_from"] = "evaluation.block_size" if settings.block_size else "training"
        with equipped(target, draft_model.eval()):
            if settings.compare_block_sizes:
                comparison = _compare(target, draft_model, config, split, recipe, console)
                block_size = comparison.chosen
                details |= {"block_size_from": "comparison", "block_comparison": comparison.as_json()}
            with EvaluationDisplay(console) as display:
                result = evaluate(
                    target,
                    draft_model,
                    config,
                    split.measured,
                    settings,
                    table_ids=training,
                    seed=recipe.run.seed,
                    progress=display.update,
                    block_size=block_size,
                )
        return replace(result, details={**result.details, **details})
    finally:
        target.close()


def _compare(
    target: Target,
    draft_model: DraftModel,
    config: DrafterConfig,
    split: Split,
    recipe: Recipe,
    console: Console,
) -> BlockComparison:
    """Try the block sizes that the recipe names, and tell what was found."""
    from slipstream.decoding.block_trial import compare_block_sizes

    sizes = recipe.evaluation.compare_block_sizes
    with TrialDisplay(console, sizes, len(split.tried)) as display:
        found = compare_block_sizes(
            target,
            draft_model,
            config,
            split.tried,
            sizes,
            recipe.evaluation,
            separate=split.separate,
            seed=recipe.run.seed,
            progress=display.update,
        )
    print_comparison(found, console)
    return found


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
