"""``slipstream plan`` on the command line."""

from __future__ import annotations

import argparse
import json
import math

from slipstream.cli_parts import Commands, Parser, add_command, console, given_recipe
from slipstream.errors import ConfigError, TrainingError

_MOST_GPUS, _MOST_MACHINES = 1024, 65536  # far above any use: a slip of the keyboard is a sentence, not a long list


def _plan(args: argparse.Namespace, overrides: list[str]) -> int:
    for option, value, low, high in (
        ("--machines", args.machines, 1, _MOST_MACHINES),
        ("--gpus", args.gpus, 0, _MOST_GPUS),
    ):
        if value is not None and not low <= value <= high:
            raise ConfigError(f"{option} is {value}; it must be at least {low} and at most {high}")
    size = args.gpu_memory
    if size is not None and not 0 < size < math.inf:  # nan fails every comparison
        raise ConfigError(f"--gpu-memory is {size:g}; give the GiB of one GPU, above 0")
    recipe = given_recipe(args, overrides)

    from slipstream.recipe import require_warm_start
    from slipstream.training.placement import place

    require_warm_start(recipe)
    found = place(
        recipe,
        machines=args.machines,
        gpus=args.gpus,
        gpu_bytes=None if size is None else int(size * 2**30),
    )
    out = console()
    if args.json:
        print(json.dumps(found.as_json(), indent=2))
    else:
        for line in found.lines():
            out.print(line, markup=False, soft_wrap=True)
    if found.refusals:
        more = len(found.refusals) - 1
        raise TrainingError(found.refusals[0] + (f" (and {more} more device{'s' * (more > 1)})" if more else ""))
    return 0


def add_plan(commands: Commands[Parser]) -> None:
    """Add the command to the command line. Loads no torch."""
    sub = add_command(
        commands,
        "plan",
        _plan,
        "which device does what, and whether it fits",
        """
        Prints who owns what (machine, rank, drafter's device, target replicas, micro-batches of a step), and what each
        device must hold against what is free on it. Loads no weights and reads no data.
          slipstream plan recipe.toml                                  on the GPUs of this machine, chosen
          slipstream plan recipe.toml --topology.targets cuda:0 cuda:1 --topology.drafters cuda:2
          slipstream plan recipe.toml --topology.targets cuda:0+cuda:1 --topology.drafters cuda:1
                                                                       one replica over two GPUs, one of them shared
          slipstream plan recipe.toml --machines 2                     each like this one
          slipstream plan recipe.toml --gpus 8 --gpu-memory 80         for GPUs that are not here
        Exit code 2 where something cannot fit: device, need, what is free, and the cure. The memory is an estimate.
        """,
        dry_run=False,
    )
    sub.add_argument(
        "recipe", help="recipe file (.toml); settings behind it, as --section.key value, win over the file"
    )
    sub.add_argument("--machines", type=int, default=1, metavar="N", help="machines, all alike (default 1)")
    sub.add_argument("--gpus", type=int, default=None, metavar="N", help="GPUs of each machine, instead of those here")
    sub.add_argument("--gpu-memory", type=float, default=None, metavar="GIB", help="GiB free on each, instead of here")
    sub.add_argument("--json", action="store_true", help="one JSON object; sizes in bytes")
