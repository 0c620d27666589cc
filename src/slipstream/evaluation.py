"""Evaluate a drafter that lies on disk: held-out prompts, real block decoding, and a table of what was measured.

Reads files only: a run's ``recipe.toml`` and ``drafter/``, or a recipe and any drafter directory.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.config import Recipe
from slipstream.errors import ConfigError, DecodingError, TargetError
from slipstream.recipe import load_recipe

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

    ``overrides`` change the recipe's settings for this evaluation. Returns None for a dry run.
    Raises ConfigError for a path that is neither, and every error of loading and decoding.
    """
    from slipstream.training.hardware import resolve_device

    is_run = (path / "recipe.toml").is_file()
    if not is_run and path.is_dir():
        raise ConfigError(
            f"{path} is not a run directory (it has no recipe.toml); give a run, or a recipe with --drafter"
        )
    recipe = load_recipe(path / "recipe.toml" if is_run else path, overrides)
    directory = drafter if drafter is not None else path / "drafter"
    if not is_run and drafter is None:
        raise ConfigError(f"{path} is a recipe; say which drafter to evaluate with --drafter DIR")
    if output is None and is_run and drafter is None:
        output = path / "evaluation.json"
    if recipe.run.threads > 0:
        import torch

        torch.set_num_threads(recipe.run.threads)
    device = resolve_device(recipe.run.device)
    dtype = evaluation_dtype(recipe, device)
    console.print(
        f"evaluating {directory} with {recipe.target.path} on {device}, {str(dtype).removeprefix('torch.')}, "
        f"temperature {recipe.evaluation.temperature}, at most {recipe.evaluation.max_new_tokens} tokens a response",
        markup=False,
        soft_wrap=True,
    )
    if dry_run:
        return None
    trained_for = _trained_for(path) if is_run and drafter is None else None
    result = evaluate_drafter(recipe, directory, device=device, dtype=dtype, trained_for=trained_for, console=console)
    print_result(result, console)
    if output is not None:
        _write(output, {**result.as_json(), "drafter": str(directory), **_circumstances(recipe, device)})
        console.print(f"written: {output}", markup=False, soft_wrap=True)
    refuse_lossy(result)
    return result


def refuse_lossy(result: EvalResult) -> None:
    """Raise DecodingError for a greedy response that differs from plain decoding otherwise than at a near tie."""
    lossy = [d for d in result.first_differences if not d.get("near_tie")] if result.temperature == 0 else []
    if lossy:
        raise DecodingError(
            f"not lossless: {len(lossy)} of {result.lossless_responses} greedy responses differ from plain decoding "
            f"where the target has no near tie, first at token {lossy[0].get('position')} of prompt "
            f"{lossy[0].get('prompt')}; this is a fault of the decoding, not of the drafter: do not trust the "
            "acceptance, and report it"
        )


def evaluate_drafter(
    recipe: Recipe,
    directory: Path,
    *,
    device: torch.device,
    dtype: torch.dtype,
    trained_for: str | None = None,
    console: Console,
) -> EvalResult:
    """Load target and drafter and measure. The free baselines' tables are made of the recipe's training data.

    ``trained_for`` is the digest of the target that the drafter learned from, where it is known; another target is
    refused with TargetError.
    """
    from slipstream.data.pack import build_dataset
    from slipstream.decoding.acceptance import evaluate
    from slipstream.drafter.store import load_drafter
    from slipstream.target.model import load_target
    from slipstream.training.heldout import read_prompts

    if not recipe.data.heldout:
        raise ConfigError("data.heldout is empty; name a file of prompts that are not trained on")
    draft_model, config = load_drafter(directory, device=device, dtype=dtype)
    target = load_target(recipe.target, device=device, dtype=dtype)
    try:
        if trained_for and trained_for != target.info.digest:
            raise TargetError(
                f"{directory} was trained for the target {trained_for[:12]}, and {recipe.target.path} is another "
                f"({target.info.digest[:12]}); give the trained one, or a recipe with --drafter to compare on purpose"
            )
        prompts = read_prompts(recipe, target, recipe.evaluation.max_prompts)
        training: list[list[int]] = []
        if recipe.data.train:
            dataset = build_dataset(recipe.data, target.tokenizer, stop_ids=target.info.eos_ids)
            training = table_documents(dataset, console)
        with EvaluationDisplay(console) as display:
            return evaluate(
                target,
                draft_model.eval(),
                config,
                prompts,
                recipe.evaluation,
                table_ids=training,
                seed=recipe.run.seed,
                progress=display.update,
            )
    finally:
        target.close()


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


class EvaluationDisplay:
    """Progress over plain and then block decoding of the same prompts: a bar each on a terminal, lines elsewhere."""

    def __init__(self, console: Console) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self.console = console
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._start("plain decoding")

    def _start(self, stage: str) -> None:
        self._stage = stage
        self._bar = self._bars.add_task(stage, total=None, figures="")
        self._began = time.monotonic()
        self._told = 0

    def __enter__(self) -> EvaluationDisplay:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def update(self, done: int, total: int) -> None:
        """Note that ``done`` of ``total`` responses have ended, the first half of them without the drafter."""
        prompts = total // 2
        ended = done if done <= prompts else done - prompts
        spent = max(time.monotonic() - self._began, 1e-9)
        left = f"took {spent:.0f} s" if ended == prompts else f"about {spent * (prompts - ended) / ended:.0f} s left"
        figures = f"{ended / spent:.1f} prompts/s, {left}"
        self._bars.update(self._bar, completed=ended, total=prompts, figures=figures)
        if not self.console.is_terminal and (fifth := 5 * ended // prompts) > self._told:
            self._told = fifth
            text = f"{self._stage}: {ended} of {prompts} prompts, {figures}"
            self.console.print(text, markup=False, soft_wrap=True)
        if done == prompts:
            self._start("with the drafter")


def print_result(result: EvalResult, console: Console) -> None:
    """Print acceptance beside the free baselines, losslessness and measured speed."""
    from rich.table import Table

    table = Table(title=f"block {result.block_size}, {result.prompts} prompts", title_justify="left")
    table.add_column("drafts from")
    table.add_column("tau", justify="right")
    table.add_row("nothing (plain decoding)", "1.000")
    table.add_row("this drafter", f"{result.tau:.3f}", style="bold")
    for name, tau in result.baselines.items():
        table.add_row(name.replace("_", " "), f"{tau:.3f}")
    console.print(table)
    by_position = "  ".join(f"{share:.3f}" for share in result.acceptance_by_position)
    console.print(f"acceptance by position (cumulative): {by_position}", markup=False)
    console.print(f"mean over responses: tau {result.tau_per_response:.3f}", markup=False)
    if result.lossless_responses:
        verdict = "lossless" if result.lossless_equal == result.lossless_responses else "NOT lossless"
        console.print(
            f"{verdict}: {result.lossless_equal} of {result.lossless_responses} greedy responses equal plain decoding",
            markup=False,
        )
        ties = sum(bool(d.get("near_tie")) for d in result.first_differences)
        if result.first_differences:
            console.print(
                f"  {ties} of {len(result.first_differences)} first differences are near ties of the target's logits; "
                "float32 decides them exactly (--evaluation.dtype float32)",
                markup=False,
                soft_wrap=True,
            )
        for difference in [d for d in result.first_differences if not d.get("near_tie")][:5]:
            console.print(f"  not a near tie: {difference}", markup=False, soft_wrap=True)
    speedup = result.as_json()["speedup"]
    console.print(
        f"speed: {result.tokens_per_second:.1f} tokens/s with the drafter, "
        f"{result.baseline_tokens_per_second:.1f} without" + ("" if speedup is None else f": {speedup:.2f} x"),
        markup=False,
    )
    if (even := result.details.get("break_even_tau")) is not None:
        console.print(
            f"a round of drafting and verifying cost {even:.2f} plain steps: speed-up begins at tau {even:.2f}",
            markup=False,
            soft_wrap=True,
        )
        if even < 1:
            console.print(
                "a round cannot cost less than a plain step: other work slowed plain decoding; distrust the speed-up",
                style="yellow",
                soft_wrap=True,
            )


def _trained_for(run: Path) -> str | None:
    """Return the digest of the target that a run was trained on; None for a run that does not tell."""
    import json

    try:
        record = json.loads((run / "run.json").read_text(encoding="utf-8"))
        return str(record["identity"]["target.digest"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{run / 'run.json'} does not tell which target was trained on ({type(error).__name__}); "
            "evaluate with a recipe and --drafter instead"
        ) from None


def _circumstances(recipe: Recipe, device: torch.device) -> dict[str, Any]:
    """Return what a number must be read with."""
    import platform

    import torch
    import transformers

    return {
        "target": recipe.target.path,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({platform.machine()})",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "thinking": recipe.data.thinking,
        "heldout": list(recipe.data.heldout),
        "seed": recipe.run.seed,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _write(path: Path, tree: dict[str, Any]) -> None:
    from slipstream.provenance import write_json

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, tree)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; free space or name another --output") from None
