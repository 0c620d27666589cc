"""Which recipe the quickstart runs: a pair's own, from scratch or from the drafter that is shipped with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from slipstream.config import Recipe
from slipstream.errors import ConfigError
from slipstream.pairs import pair_directory, pairs, shipped_drafter
from slipstream.recipe import apply_overrides, load_recipe, validate

Start = Literal["scratch", "shipped"]
STARTS: tuple[Start, ...] = ("scratch", "shipped")
MANY_SLOTS = 4  # a smaller block has no half that is worth a trial
CONTINUED = 4  # learning rates are divided by it for a drafter that is trained already


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What the command line asks for: a pair by name, where the drafter starts, and a file of own prompts."""

    pair: str = field(default_factory=lambda: pairs()[0])
    start: Start = "scratch"
    prompts: Path | None = None

    def as_arguments(self) -> list[str]:
        """Return what to type for it."""
        own = [] if self.prompts is None else ["--prompts", str(self.prompts)]
        return ["--target", self.pair, "--from", self.start, *own]


def packaged_recipe(pair: str | None = None) -> Recipe:
    """Return a pair's recipe (the first pair's) as it lies in the package, its data files named relative to it."""
    return load_recipe(pair_directory(pair or pairs()[0]) / "recipe.toml")


def quickstart_recipe(choice: Choice | None = None, overrides: Sequence[str] = ()) -> Recipe:
    """Return the recipe to run: data files resolved inside the package, the start put in, overrides applied.

    A shipped drafter brings its own shape, and is continued at a quarter of the learning rates. Raises ConfigError for
    a bad override, and for a pair without a shipped drafter.
    """
    choice = choice or Choice()
    directory = pair_directory(choice.pair)
    recipe = packaged_recipe(choice.pair)
    train, heldout = (tuple(str(directory / f) for f in files) for files in (recipe.data.train, recipe.data.heldout))
    recipe = replace(recipe, data=replace(recipe.data, train=train, heldout=heldout))
    if choice.start == "shipped":
        shipped = shipped_drafter(choice.pair)
        if shipped is None:
            raise ConfigError(f"no drafter is shipped with {choice.pair}; start from scratch, without --from shipped")
        trained = load_recipe(directory / "run" / "recipe.toml")
        training = replace(
            recipe.training,
            learning_rate=recipe.training.learning_rate / CONTINUED,
            muon_learning_rate=recipe.training.muon_learning_rate / CONTINUED,
        )
        recipe = replace(
            recipe, drafter=replace(trained.drafter, warm_start=str(shipped)), training=training
        )  # fmt: skip
    if overrides:
        recipe = apply_overrides(recipe, overrides)
    validate(recipe)
    return recipe


def shipped_settings(recipe: Recipe, trained: int) -> list[str]:
    """Return the overrides that the shipped drafter is evaluated with: its block is found by measurement.

    It drafts the whole block that it was trained with (``trained``), and about half of that is tried beside all of it.
    Nothing is changed for who has set a block size.
    """
    if recipe.evaluation.block_size or recipe.evaluation.compare_block_sizes or trained < MANY_SLOTS:
        return []
    sizes = (str(trained // 2 + 1), str(trained))
    return ["--evaluation.draft_whole_block", "true", "--evaluation.compare_block_sizes", *sizes]


def pair_of(recipe: Recipe) -> str | None:
    """Return the name of the pair whose target a recipe names; None for a target of its own."""
    return recipe.target.path if recipe.target.path in pairs() else None
