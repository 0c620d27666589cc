"""What the subcommands share: one-line errors, the console, the recipe, how a subcommand is added."""

from __future__ import annotations

import argparse
import errno
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from slipstream.config import Recipe

Handler = Callable[[argparse.Namespace, list[str]], int]


class Parser(argparse.ArgumentParser):
    """argparse with one-line errors."""

    def error(self, message: str) -> None:  # type: ignore[override]
        """Raise ConfigError with the message and where help is."""
        raise ConfigError(f"{message}; see `{self.prog} --help`")


Commands = argparse._SubParsersAction


def console() -> Console:
    """Return the console that commands print to."""
    from rich.console import Console

    return Console(highlight=False)


def given_recipe(args: argparse.Namespace, overrides: list[str]) -> Recipe:
    """Return the recipe of a command with its overrides, and give torch the threads that it asks for.

    Raises ConfigError for a file or a setting that is wrong.
    """
    from slipstream.recipe import load_recipe

    recipe = load_recipe(args.recipe, overrides)
    if recipe.run.threads > 0:
        import torch

        torch.set_num_threads(recipe.run.threads)
    return recipe


def add_command(
    commands: Commands[Parser], name: str, handler: Handler, summary: str, text: str, *, dry_run: bool = True
) -> argparse.ArgumentParser:
    """Add a subcommand and return its parser; ``handler(arguments, rest)`` returns the exit code.

    ``summary``: its line in the help of the whole; ``text``: its own help. ``dry_run``: whether it takes --dry-run.
    """
    parser = commands.add_parser(
        name,
        help=summary,
        description=textwrap.dedent(text).strip(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    if dry_run:
        parser.add_argument("--dry-run", action="store_true", help="print the resolved plan and stop")
    parser.set_defaults(handler=handler)
    return parser


def given_path(value: str | None, option: str) -> Path | None:
    """Return the path that an option gave, or None where it was left out. Raises ConfigError for an empty one."""
    if value == "":
        raise ConfigError(f"{option} is empty (a variable that is not set?); give a path or leave {option} out")
    return None if value is None else Path(value)


def too_long(error: OSError) -> int:
    """Tell in one line of a path that no disk takes, and return exit code 2; raise any other error again."""
    if error.errno != errno.ENAMETOOLONG:
        raise error
    print(
        f"slipstream: {str(error.filename)[:60]}... is longer than a path may be; give a shorter one", file=sys.stderr
    )
    return 2
