"""The subcommands about this machine. They take no recipe and no settings."""

from __future__ import annotations

import argparse

from slipstream.cli_parts import Commands, Parser, add_command, console
from slipstream.errors import ConfigError

TOOLS = ("doctor",)


def refuse_rest(rest: list[str], command: str) -> None:
    """Raise ConfigError for anything that a tool was given and does not take; settings of a recipe are among it."""
    if rest:
        raise ConfigError(f"{command} takes no {rest[0]}; see `slipstream {command} --help`")


def _doctor(args: argparse.Namespace, rest: list[str]) -> int:
    from slipstream.compilation import doctor
    from slipstream.data.cache import cache_directory

    refuse_rest(rest, "doctor")
    return doctor.doctor(console=console(), as_json=args.json, slipstream_cache=cache_directory())


def add_tools(commands: Commands[Parser]) -> None:
    """Add every tool to the command line. Loads no torch."""
    sub = add_command(
        commands,
        "doctor",
        _doctor,
        "what is installed here, what is unsafe in it, and what will bite",
        """
        Shows versions and builds (torch with its git commit, CUDA, driver, Triton, FLA, transformers), GPUs, caches,
        disks and environment variables. Provokes every known hazard of compiling in several threads, each in a fresh
        process: as it is installed, and after Slipstream has made it safe. Needs no GPU and changes nothing.
          slipstream doctor                     tables, and at the end what will bite with its cure
          slipstream doctor --json > here.json  the same as one JSON object: for a report of a fault, or for a script
        Exit code 1 where something will bite: a hazard that is not held, compilation switched off, a cache that
        cannot be written, less than 2 GiB of free disk, a package that cannot be imported. Otherwise 0.
        """,
        dry_run=False,
    )
    sub.add_argument("--json", action="store_true", help="print one JSON object with stable keys instead of tables")
