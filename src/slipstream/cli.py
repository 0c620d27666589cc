"""The ``slipstream`` command. Each subcommand takes a recipe and ``--section.key value`` overrides.

Exit codes: 0 done; 2 a mistake that the user can mend (one line on stderr); 130 interrupted; 1 with a
traceback: a fault of ours; 1 without one: a tool (``cli_tools``) found what it looks for.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream import __version__
from slipstream.cli_parts import Parser, add_command, console, given_path, given_recipe, too_long
from slipstream.cli_plan import add_plan
from slipstream.cli_quickstart import add_quickstart
from slipstream.cli_tools import TOOLS, add_tools
from slipstream.errors import ConfigError, SlipstreamError

if TYPE_CHECKING:
    from slipstream.config import Recipe


def _prepare(args: argparse.Namespace, overrides: list[str]) -> int:
    from slipstream.preparation import prepare

    prepare(
        given_recipe(args, overrides),
        show=args.show,
        regenerate_to=Path(args.output) if args.regenerate else None,
        sources="heldout" if args.heldout else "train",
        dry_run=args.dry_run,
        console=console(),
    )
    return 0


def _show_plan(recipe: Recipe) -> int:
    from slipstream.recipe import recipe_as_toml
    from slipstream.training.plan import plan

    out = console()
    out.print(recipe_as_toml(recipe), markup=False)
    for name, value in plan(recipe).items():
        out.print(f"{name:24s} {value}", markup=False, soft_wrap=True)
    return 0


def _train(args: argparse.Namespace, overrides: list[str]) -> int:
    from slipstream.preflight import cheap_checks
    from slipstream.recipe import require_warm_start
    from slipstream.training.start import start

    recipe, out = given_recipe(args, overrides), console()
    require_warm_start(recipe)
    if args.dry_run:
        return _show_plan(recipe)
    return start(
        recipe,
        arguments=args.arguments,
        resume=args.resume,
        restarts=args.max_restarts,
        console=out,
        preflight=cheap_checks(out),
    )


def _prewarm(args: argparse.Namespace, overrides: list[str]) -> int:
    from slipstream.recipe import require_warm_start

    recipe = given_recipe(args, overrides)
    require_warm_start(recipe)
    if args.dry_run:
        return _show_plan(recipe)
    from slipstream.preflight import cheap_checks
    from slipstream.prewarm import prewarm

    out = console()
    return prewarm(recipe, console=out, devices=args.device, preflight=cheap_checks(out))


def _evaluate(args: argparse.Namespace, overrides: list[str]) -> int:
    from slipstream.evaluation.command import evaluate_path
    from slipstream.usage import refuse_idle_settings

    refuse_idle_settings(overrides, "evaluate")
    evaluate_path(
        Path(args.path),
        overrides,
        drafter=given_path(args.drafter, "--drafter"),
        output=given_path(args.output, "--output"),
        dry_run=args.dry_run,
        console=console(),
    )
    return 0


def _export(args: argparse.Namespace, overrides: list[str]) -> int:
    from slipstream.export.zlab import export_run
    from slipstream.usage import refuse_idle_settings

    refuse_idle_settings(overrides, "export")
    export_run(Path(args.path), Path(args.to), overrides, dry_run=args.dry_run, console=console())
    return 0


def _preflight(args: argparse.Namespace, overrides: list[str]) -> int:
    from slipstream.preflight import CHECKS, run_preflight
    from slipstream.recipe import require_warm_start

    recipe = given_recipe(args, overrides)
    require_warm_start(recipe)
    if args.dry_run:
        console().print(f"would check {', '.join(CHECKS)} with {recipe.target.path or 'no target'}", markup=False)
        return 0
    report = run_preflight(recipe, output=Path(args.output) if args.output else None, console=console())
    return 0 if report.passed else 2


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands. Unknown ``--section.key value`` arguments are left for the recipe."""
    parser = Parser(
        prog="slipstream",
        description="Train a DFlash drafter for your model, and prove what a server will get from it.",
        epilog="First time? `slipstream quickstart` runs the whole line on a small real model, without a GPU. "
        "`slipstream COMMAND --help` lists a command's options and settings. "
        "Something odd? `slipstream doctor` says what here will bite.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"slipstream {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=Parser)
    recipe_help = "recipe file (.toml); settings behind it, as --section.key value, win over the file"

    sub = add_command(
        commands,
        "prepare",
        _prepare,
        "render, mask and pack conversations; or let the target answer the prompts itself",
        """
        Reads data.train, renders it with the target's chat template, derives the loss mask, packs rows and caches them.
          slipstream prepare recipe.toml --show 3
              prints three samples, supervised tokens in colour
          slipstream prepare recipe.toml --regenerate --output answers.jsonl
              replaces the answers by the target's own (start again to resume), then set data.train to that file
        """,
    )
    sub.add_argument("recipe", help=recipe_help)
    sub.add_argument("--show", type=int, default=0, metavar="N", help="print N samples with their supervised tokens")
    sub.add_argument("--regenerate", action="store_true", help="generate the answers with the target")
    sub.add_argument("--output", metavar="FILE", default=None, help="file for regenerated conversations (.jsonl)")
    sub.add_argument("--heldout", action="store_true", help="work on data.heldout instead of data.train")

    sub = add_command(
        commands,
        "train",
        _train,
        "train a drafter",
        """
        Trains as the recipe says, into run.directory: metrics.jsonl, tensorboard/, checkpoints/, drafter/.
          slipstream train recipe.toml --dry-run                     what would run, and how large it is
          slipstream train recipe.toml --run.directory runs/second   another directory
          slipstream train recipe.toml --resume                      go on from the newest complete checkpoint
        Several drafter devices ([topology], `slipstream plan`) are trained on by a process each, started here. On many
        machines torchrun starts them, with one process for each drafter device of a machine:
          torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint HOST:PORT \\
              -m slipstream train recipe.toml
        """,
    )
    sub.add_argument("recipe", help=recipe_help)
    sub.add_argument("--resume", action="store_true", help="continue the run in run.directory exactly")
    sub.add_argument(
        "--max-restarts",
        type=int,
        default=0,
        metavar="N",
        help="start the ranks again after a failure, from the newest checkpoint, at most N times (default: 0)",
    )

    add_plan(commands)

    sub = add_command(
        commands,
        "evaluate",
        _evaluate,
        "measure acceptance by real block decoding",
        """
        Decodes the held-out prompts with the drafter and without it: acceptance length, acceptance by position,
        losslessness, measured speed-up, and the free baselines on the same answers.
          slipstream evaluate runs/drafter                          a run; writes runs/drafter/evaluation.json
          slipstream evaluate recipe.toml --drafter DIR             any drafter directory in z-lab's layout
        """,
    )
    sub.add_argument("path", help="run directory, or a recipe together with --drafter")
    sub.add_argument("--drafter", metavar="DIR", help="drafter directory (config.json and model.safetensors)")
    sub.add_argument("--output", metavar="FILE", help="where the JSON goes (a run: its evaluation.json)")

    sub = add_command(
        commands,
        "export",
        _export,
        "write the drafter for vLLM, SGLang and z-lab's package, and prove it",
        """
        Writes one directory that z-lab's package, SGLang and vLLM load; reads it back; compares logits, keys and
        configuration; prints the serve commands with the right numbers.
          slipstream export runs/drafter --to my-drafter
        """,
    )
    sub.add_argument("path", help="run directory")
    sub.add_argument("--to", required=True, metavar="DIR", help="new directory for the drafter")

    sub = add_command(
        commands,
        "preflight",
        _preflight,
        "prove a launch before it costs GPU hours",
        """
        Runs the named checks of silent failures on a small slice of the data, in about a minute.
          slipstream preflight recipe.toml
        """,
    )
    sub.add_argument("recipe", help=recipe_help)
    sub.add_argument("--output", metavar="FILE", help="file for the report as JSON; without it none is written")

    sub = add_command(
        commands,
        "prewarm",
        _prewarm,
        "compile and tune what a run will need, before it is launched",
        """
        Makes one step of this recipe's run on its own first rows, and keeps all that was compiled and tuned for it as
        a compile bundle, which `slipstream train` loads: the run then starts warm. Trains nothing and writes nothing
        into run.directory. On a CPU nothing is compiled.
          slipstream prewarm recipe.toml                                     for run.device
          slipstream prewarm recipe.toml --device cuda:0 --device cuda:1     for each of several
          slipstream prewarm recipe.toml --dry-run                           what would run, and how large it is
        Give it the settings that the run will have: other shapes need another bundle. `slipstream cache list` shows
        what is kept, `slipstream cache pack` takes it to machines of the same kind.
        """,
    )
    sub.add_argument("recipe", help=recipe_help)
    sub.add_argument(
        "--device",
        action="append",
        default=[],
        metavar="DEVICE",
        help="a device to prewarm; may be given several times (default: run.device)",
    )

    add_quickstart(commands)
    add_tools(commands)
    return parser


def _subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each command by name; of a command, of each of its actions."""
    found = [action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(found[0]) if found else {}


def _parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the command's arguments, and the settings that are left. Prints help; raises ConfigError for a slip."""
    from slipstream.usage import command_settings, misplaced_setting, mistyped_option, unknown_command

    parser = build_parser()
    commands = _subcommands(parser)
    words = [a for a in arguments if not a.startswith("-")]
    if words and words[0] not in commands:
        raise ConfigError(unknown_command(words[0], list(commands)))
    if words and words[0] not in TOOLS and ("--help" in arguments or "-h" in arguments):
        commands[words[0]].epilog = command_settings(words[0])
    args, rest = parser.parse_known_args(arguments)
    chosen = [commands[word] for word in words[:1]]
    actions = [action for command in chosen for action in _subcommands(command).values()]
    options = [option for p in (parser, *chosen, *actions) for option in p._option_string_actions]
    if slip := mistyped_option(rest, options):
        raise ConfigError(f"{slip}; see `{' '.join(['slipstream', *words[:1]])} --help`")
    if not words:
        parser.print_help()
        raise ConfigError("no command given; start with `slipstream quickstart`")
    for name in ("recipe", "path"):
        if slip := misplaced_setting(arguments, name, getattr(args, name, None)):
            raise ConfigError(slip)
    return args, rest


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _interrupt)  # as Ctrl-C: what is half-written is removed on the way out
    try:
        args, rest = _parse(arguments)
        if args.handler is _prepare:
            if args.regenerate and not args.output:
                raise ConfigError("--regenerate needs --output FILE for the new conversations")
            if args.output and not args.regenerate:
                raise ConfigError(
                    f"--output {args.output} is for --regenerate; packed rows go to the cache by themselves"
                )
            if args.show < 0:
                raise ConfigError(f"--show is {args.show}; give how many samples to print")
        args.arguments = arguments
        return int(args.handler(args, rest))
    except SlipstreamError as error:
        print(f"slipstream: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader has seen enough (`| head`); the interpreter's own flush must not complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        return too_long(error)
    except KeyboardInterrupt:
        if os.environ.get("SLIPSTREAM_AGENT") != "1":  # of several ranks, the process that started them tells
            print("slipstream: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
