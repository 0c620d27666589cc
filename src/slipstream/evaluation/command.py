"""Evaluate a drafter that lies on disk: held-out prompts, real block decoding, and a table of what was measured.

Reads files only: a run's ``recipe.toml`` and ``drafter/``, or a recipe and any drafter directory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.config import EvaluationConfig, Recipe
from slipstream.decoding.losslessness import faults
from slipstream.errors import ConfigError, DecodingError
from slipstream.evaluation.blocks import check_block_sizes
from slipstream.evaluation.display import listed, print_result
from slipstream.evaluation.measure import evaluate_drafter, evaluation_dtype
from slipstream.evaluation.record import circumstances, output_path, trained_with, write_record
from slipstream.pairs import drafter_path
from slipstream.recipe import load_recipe

if TYPE_CHECKING:
    from rich.console import Console

    from slipstream.records import EvalResult


def evaluate_path(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    drafter: Path | None = None,
    output: Path | None = None,
    dry_run: bool = False,
    console: Console,
) -> EvalResult | None:
    """Evaluate a run directory, or a recipe with ``drafter``; print the table and write the JSON.

    ``overrides`` change the recipe's settings for this evaluation. The JSON goes to ``output``; for a run's own drafter
    to its ``evaluation.json``, or, with overrides, beside one that is there. Returns None for a dry run.
    Raises ConfigError for a path that is neither, and every error of loading and decoding.
    """
    from slipstream.training.hardware import resolve_device

    is_run = (path / "recipe.toml").is_file()
    if not is_run and path.is_dir():
        raise ConfigError(
            f"{path} is not a run directory (it has no recipe.toml); give a run, or a recipe with --drafter"
        )
    recipe = load_recipe(path / "recipe.toml" if is_run else path, overrides)
    check_block_sizes(recipe.evaluation)
    directory = drafter_path(str(drafter)) if drafter is not None else path / "drafter"
    if not is_run and drafter is None:
        raise ConfigError(f"{path} is a recipe; say which drafter to evaluate with --drafter DIR")
    if recipe.run.threads > 0:
        import torch

        torch.set_num_threads(recipe.run.threads)
    device = resolve_device(recipe.run.device)
    dtype = evaluation_dtype(recipe, device)
    console.print(
        f"evaluating {directory} with {recipe.target.path} on {device}, {str(dtype).removeprefix('torch.')}, "
        f"temperature {recipe.evaluation.temperature}, at most {recipe.evaluation.max_new_tokens} tokens a response"
        + _block(recipe.evaluation),
        markup=False,
        soft_wrap=True,
    )
    if dry_run:
        return None
    own = is_run and drafter is None
    trained = trained_with(path) if own else None
    if own and trained is None:
        told = (
            f"warning: {path} has no run.json: whether {recipe.target.path} is the target it learned from is not known"
        )
        console.print(told, markup=False, soft_wrap=True)
    record = circumstances(recipe, directory, device, overrides=overrides)
    result = evaluate_drafter(recipe, directory, device=device, dtype=dtype, trained_with=trained, console=console)
    print_result(result, console)
    if output is None and own:
        output = output_path(path, overridden=not _same(recipe, load_recipe(path / "recipe.toml")))
    if output is not None:
        write_record(output, {**result.as_json(), **record})
        console.print(f"written: {output}", markup=False, soft_wrap=True)
    refuse_lossy(result)
    return result


def _block(settings: EvaluationConfig) -> str:
    """Return what the settings say of the block size."""
    if settings.compare_block_sizes:
        return f", after trying blocks of {listed(settings.compare_block_sizes)}"
    return f", in blocks of {settings.block_size}" if settings.block_size else ""


def _same(a: Recipe, b: Recipe) -> bool:
    """Whether two recipes measure the same; where the run lies does not matter."""
    run = replace(a.run, directory=b.run.directory)
    return replace(a, run=run) == b


def refuse_lossy(result: EvalResult) -> None:
    """Raise DecodingError for a greedy response that differs from plain decoding otherwise than at a near tie."""
    lossy = faults(result.first_differences) if result.temperature == 0 else ()
    if lossy:
        raise DecodingError(
            f"not lossless: {len(lossy)} of {result.lossless_responses} greedy responses differ from plain decoding "
            f"where the target has no near tie, first at token {lossy[0].get('position')} of prompt "
            f"{lossy[0].get('prompt')}; this is a fault of the decoding, not of the drafter: do not trust the "
            "acceptance, and report it"
        )
