"""``slipstream quickstart``: prepare, train, measure and export in one command, on a small real model.

The recipe, the prompts and the target's own answers come with the package. Nothing here is special: every step is what
the other commands do, and the recipe can be copied and changed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.config import Recipe
from slipstream.errors import ConfigError
from slipstream.recipe import apply_overrides, load_recipe, recipe_as_toml, validate

if TYPE_CHECKING:
    from rich.console import Console

DATA = Path(__file__).parent / "quickstart_data"


def quickstart_recipe(overrides: Sequence[str] = ()) -> Recipe:
    """Return the quickstart's recipe, its data files resolved inside the package, with overrides applied.

    Raises ConfigError for a bad override.
    """
    recipe = load_recipe(DATA / "recipe.toml")
    train, heldout = (tuple(str(DATA / f) for f in files) for files in (recipe.data.train, recipe.data.heldout))
    recipe = replace(recipe, data=replace(recipe.data, train=train, heldout=heldout))
    if overrides:
        recipe = apply_overrides(recipe, overrides)
        validate(recipe)
    return recipe


def step_aside(directory: Path) -> Path | None:
    """Rename an existing run directory, so that nothing of it is lost; return its new name, None if there was none."""
    if not directory.exists():
        return None
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(directory.stat().st_mtime))
    for attempt in range(100):
        kept = directory.with_name(f"{directory.name}-{stamp}" + (f"-{attempt}" if attempt else ""))
        if not kept.exists():
            try:
                directory.rename(kept)
            except OSError as error:
                raise ConfigError(
                    f"{directory} exists and cannot be renamed ({error.strerror}); move it away"
                ) from None
            return kept
    raise ConfigError(f"{directory} exists and so do its hundred earlier names; move some away")


def quickstart(overrides: Sequence[str] = (), *, dry_run: bool = False, console: Console) -> None:
    """Run the whole line into ``run.directory`` (runs/quickstart) and say what to type next.

    Raises every error of the steps; what was finished before it stays in the run directory.
    """
    from slipstream.evaluation import evaluate_path
    from slipstream.export.zlab import export_run
    from slipstream.preflight import cheap_checks
    from slipstream.training.trainer import train

    began = time.monotonic()
    recipe = quickstart_recipe(overrides)
    directory = Path(recipe.run.directory)
    if dry_run:
        console.print(recipe_as_toml(recipe), markup=False)
        return
    if recipe.run.threads > 0:
        import torch

        torch.set_num_threads(recipe.run.threads)

    def headline(text: str) -> None:
        console.print(f"\n[bold]{text}[/bold]  ({time.monotonic() - began:.0f} s)")

    console.print(
        f"Training a drafter for {recipe.target.path} from scratch ({recipe.run.device}, {os.cpu_count()} CPU cores), "
        f"for {recipe.training.max_minutes:g} minutes, into {directory}.",
        markup=False,
        soft_wrap=True,
    )
    kept = step_aside(directory)
    if kept is not None:
        console.print(f"An earlier {directory} was renamed to {kept}.", markup=False, soft_wrap=True)

    headline("1. Train")
    train(recipe, argv=["slipstream", "quickstart", *overrides], console=console, preflight=cheap_checks(console))
    headline("2. Evaluate: real block decoding on held-out prompts")
    result = evaluate_path(directory, console=console)
    headline("3. Export: the drafter directory, read back and compared")
    export_run(directory, directory / "export", console=console)

    headline("Done")
    assert result is not None
    said = what_this_was(result.tau, result.baselines, recipe.training.max_minutes, recipe.run.device)
    console.print(said, markup=False, soft_wrap=True)
    console.print(
        "\nNext, for a model of your own:\n"
        "  copy recipes/minimal.toml to my.toml   and set target.path, data.train (your prompts), data.heldout\n"
        "  slipstream prepare my.toml --regenerate --output answers.jsonl   the target's own answers; then data.train\n"
        "  slipstream prepare my.toml --show 3    look at what is supervised\n"
        "  slipstream train my.toml --dry-run     sizes, memory, steps\n"
        "  slipstream preflight my.toml           prove the launch in about a minute\n"
        "  slipstream train my.toml\n"
        "  slipstream evaluate RUN\n"
        "  slipstream export RUN --to my-drafter",
        markup=False,
        soft_wrap=True,
    )


def what_this_was(tau: float, baselines: dict[str, float], minutes: float, device: str) -> str:
    """Return the honest sentence about what a few minutes can and cannot give, with what was measured."""
    name, best = max(baselines.items(), key=lambda item: item[1])
    beside = (
        f"the free {name.replace('_', ' ')} reaches {best:.3f}, and this drafter does not pay off"
        if best >= tau
        else f"it beats the best free baseline here ({name.replace('_', ' ')}, {best:.3f})"
    )
    return (
        f"{minutes:g} minutes of training ({device}) show that the line works and that acceptance rises from the "
        f"untrained 1.0, here to {tau:.3f} tokens a target pass; {beside}. A drafter that serves well needs GPU hours "
        "and hundreds of millions of tokens."
    )
