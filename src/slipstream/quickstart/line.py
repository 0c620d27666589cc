"""The whole line in one command: train, measure, compare with what is shipped, export.

The recipe, the prompts and the target's own answers come with the package. Nothing here is special: every step is what
the other commands do, and the recipe can be copied and changed.
"""

from __future__ import annotations

import itertools
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.config import Recipe
from slipstream.errors import ConfigError, SlipstreamError
from slipstream.pairs import pair_directory, shipped_drafter
from slipstream.quickstart.curve import learning_curve, print_curves
from slipstream.quickstart.settings import Choice, packaged_recipe, pair_of, quickstart_recipe, shipped_settings
from slipstream.quickstart.summary import print_summary, what_this_was
from slipstream.recipe import load_recipe, recipe_as_toml, require_warm_start

if TYPE_CHECKING:
    from rich.console import Console


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


def quickstart(
    overrides: Sequence[str] = (),
    *,
    choice: Choice | None = None,
    resume: bool = False,
    dry_run: bool = False,
    console: Console,
) -> None:
    """Run the whole line into ``run.directory`` (runs/quickstart) and say what to type next.

    ``resume`` goes on with what is there, as its own recipe says: training from the newest checkpoint unless it is
    done, then evaluation, and the export where there is none. Raises every error of the steps; what was finished
    before it stays in the run directory.
    """
    choice = choice or Choice()
    if resume:
        directory = Path(quickstart_recipe(Choice(pair=choice.pair), overrides).run.directory)
        if not (directory / "recipe.toml").is_file():
            raise ConfigError(f"there is no run in {directory} to resume; start it without --resume")
        recipe = load_recipe(directory / "recipe.toml", overrides)
    else:
        recipe = quickstart_recipe(choice, overrides)
        directory = Path(recipe.run.directory)
    require_warm_start(recipe)
    if dry_run:
        console.print(recipe_as_toml(recipe), markup=False)
        return
    if recipe.run.threads > 0:
        import torch

        torch.set_num_threads(recipe.run.threads)
    if not resume and choice.prompts is not None:
        from slipstream.quickstart.prompts import use_own_prompts

        console.print(f"\nThe target answers the prompts of {choice.prompts}.", markup=False, soft_wrap=True)
        recipe = use_own_prompts(recipe, choice.prompts, console)
    if not resume and (kept := step_aside(directory)) is not None:
        console.print(f"An earlier {directory} was renamed to {kept}.", markup=False, soft_wrap=True)
    try:
        typed = ["--resume"] if resume else choice.as_arguments()
        _run_line(recipe, [*typed, *overrides], overrides, resume=resume, console=console)
    except (KeyboardInterrupt, SlipstreamError) as error:
        begun = any((directory / "checkpoints").glob("step-*")) and isinstance(error, KeyboardInterrupt)
        if begun or _trained(directory):
            elsewhere = "" if directory == Path(packaged_recipe().run.directory) else f" --run.directory {directory}"
            text = f"What is finished stays in {directory}; go on with: {program()} quickstart --resume{elsewhere}"
            console.print(text, markup=False, soft_wrap=True)
        raise


def program() -> str:
    """Return what a shell calls this command by: its name, or its path where the environment is not activated."""
    beside = Path(sys.executable).with_name("slipstream")
    return os.path.relpath(beside) if shutil.which("slipstream") is None and beside.is_file() else "slipstream"


def training_length(recipe: Recipe) -> str:
    """Return what ends the training, in words."""
    training = recipe.training
    if training.max_minutes > 0:
        return f"{training.max_minutes:g} minutes"
    return f"{training.steps} steps" if training.steps > 0 else f"{training.epochs:g} passes over the data"


def _trained(directory: Path) -> bool:
    """Say whether training has come to its end: the drafter is written then."""
    return (directory / "drafter" / "model.safetensors").is_file()


def _run_line(
    recipe: Recipe, typed: Sequence[str], overrides: Sequence[str], *, resume: bool, console: Console
) -> None:
    """Train, evaluate and export. ``typed``: the command's arguments, for the run's record."""
    from slipstream.drafter.store import read_config
    from slipstream.evaluation.command import evaluate_path
    from slipstream.export.zlab import export_run
    from slipstream.preflight import cheap_checks
    from slipstream.training.trainer import train

    began = time.monotonic()
    directory = Path(recipe.run.directory)

    numbers = itertools.count(1)

    def headline(text: str) -> None:
        console.print(f"\n[bold]{next(numbers)}. {text}[/bold]  ({time.monotonic() - began:.0f} s)")

    def say(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    pair = pair_of(recipe)
    shipped = shipped_drafter(pair) if pair is not None else None
    start = "from scratch" if recipe.drafter.warm_start is None else f"from {recipe.drafter.warm_start}"
    if resume:
        say(f"Going on with the drafter for {recipe.target.path} in {directory}.")
    else:
        say(
            f"Training a drafter for {recipe.target.path} {start} ({recipe.run.device}, {os.cpu_count()} CPU cores), "
            f"for {training_length(recipe)}, into {directory}."
        )

    headline("Train")
    if resume and _trained(directory):
        say(f"trained already: {directory / 'drafter'}")
    else:
        train(
            recipe,
            argv=["slipstream", "quickstart", *typed],
            resume=resume,
            console=console,
            preflight=cheap_checks(console),
        )
    curves = {"this run": learning_curve(directory / "metrics.jsonl")}
    if pair is not None and (metrics := pair_directory(pair) / "run" / "metrics.jsonl").is_file():
        curves["the shipped run (GPU)"] = learning_curve(metrics)
    print_curves(curves, console)
    headline("Evaluate: real block decoding on held-out prompts")
    changed = overrides if resume else ()  # else they are in the run's own recipe
    result = evaluate_path(directory, changed, console=console)
    assert result is not None
    measured = {f"trained {start}, {training_length(recipe)}": result}
    if shipped is not None:
        headline("The same prompts with the drafter that is shipped")
        output = directory / "evaluation_shipped.json"
        settings = [*changed, *shipped_settings(recipe, read_config(shipped).block_size)]
        other = evaluate_path(directory, settings, drafter=shipped, output=output, console=console)
        assert other is not None
        measured["shipped"] = other
    headline("Export: the drafter directory, read back and compared")
    if resume and (directory / "export" / "model.safetensors").is_file():
        say(f"exported already: {directory / 'export'}")
    else:
        export_run(directory, directory / "export", changed, console=console)

    say(f"\nDone, after {time.monotonic() - began:.0f} s.")
    print_summary(measured, console)
    if recipe.drafter.warm_start is None:
        say(what_this_was(measured, training_length(recipe), recipe.run.device))
    activate = "" if program() == "slipstream" else f"  source {Path(program()).with_name('activate')}\n"
    own_start = (
        ""
        if shipped is None
        else "  slipstream quickstart --from shipped --prompts FILE   on from the shipped drafter\n"
    )
    say(
        f"\nNext, for a model of your own:\n{activate}{own_start}"
        "  copy recipes/minimal.toml to my.toml   and set target.path, data.train (your prompts), data.heldout\n"
        "  slipstream prepare my.toml --regenerate --output answers.jsonl   the target's own answers; then data.train\n"
        "  slipstream prepare my.toml --show 3    look at what is supervised\n"
        "  slipstream train my.toml --dry-run     sizes, memory, steps\n"
        "  slipstream preflight my.toml           prove the launch in about a minute\n"
        "  slipstream train my.toml\n"
        "  slipstream evaluate RUN\n"
        "  slipstream export RUN --to my-drafter"
    )
