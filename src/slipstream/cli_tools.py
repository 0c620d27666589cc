"""The subcommands about this machine. They take no recipe and no settings."""

from __future__ import annotations

import argparse

from slipstream.cli_parts import Commands, Parser, add_command, console
from slipstream.errors import ConfigError

TOOLS = ("doctor", "stress", "cache")


def refuse_rest(rest: list[str], command: str) -> None:
    """Raise ConfigError for anything that a tool was given and does not take; settings of a recipe are among it."""
    if rest:
        raise ConfigError(f"{command} takes no {rest[0]}; see `slipstream {command} --help`")


def _doctor(args: argparse.Namespace, rest: list[str]) -> int:
    from slipstream.compilation import doctor
    from slipstream.places import cache_directory

    refuse_rest(rest, "doctor")
    return doctor.doctor(console=console(), as_json=args.json, slipstream_cache=cache_directory())


def _stress(args: argparse.Namespace, rest: list[str]) -> int:
    from slipstream.compilation import stress

    refuse_rest(rest, "stress")
    return stress.run(args, console())


def _cache(args: argparse.Namespace, rest: list[str]) -> int:
    from slipstream.compilation import cache

    refuse_rest(rest, "cache")
    return cache.run(args, console())


def add_tools(commands: Commands[Parser]) -> None:
    """Add every tool to the command line. Loads no torch."""
    _add_doctor(commands)
    _add_stress(commands)
    _add_cache(commands)


def _add_doctor(commands: Commands[Parser]) -> None:
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


def _add_stress(commands: Commands[Parser]) -> None:
    from slipstream.compilation import stress

    sub = add_command(
        commands,
        "stress",
        _stress,
        "compile and tune in many threads at once, and see that nothing goes wrong",
        """
        Plays workloads of compiling and tuning in several threads at once, on cold caches, in fresh processes:
        with Slipstream's guard and without it. What fails without it shows that this machine can fail; what fails with
        it is a fault. `slipstream doctor` is quicker and looks at each hazard alone; this one lets them meet.
          slipstream stress                              every workload that this machine can run, guarded and not
          slipstream stress --guard on --seconds 300     five minutes, with the guard only
          slipstream stress --threads 8 --json out.json  more threads; every figure into a file as well
        Exit code 1 where a guarded round was not clean. Otherwise 0, whatever happened without the guard.
        """,
        dry_run=False,
    )
    stress.add_arguments(sub)


def _add_cache(commands: Commands[Parser]) -> None:
    from slipstream.compilation import cache

    sub = add_command(
        commands,
        "cache",
        _cache,
        "list what has been compiled and tuned, carry it to other machines, remove it",
        """
        What a run needs compiled and tuned is kept as a compile bundle: for one torch build, Triton, FLA, GPU and
        driver, and for one recipe's shapes. A run loads the bundle that fits it and no other.
          slipstream cache list                      what is kept here, for what it is good, size and age
          slipstream cache pack FILE                 all of it in one file, to take to other machines of the same kind
          slipstream cache unpack FILE               place what such a file holds; it is code: only from whom you trust
          slipstream cache prune --elsewhere         remove what another build, GPU or driver made
          slipstream cache prune --older-than 30 --dry-run
                                                     only say what is older than 30 days
        """,
        dry_run=False,
    )
    cache.add_arguments(sub)
