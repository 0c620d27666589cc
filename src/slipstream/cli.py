"""The ``slipstream`` command. Each subcommand takes a recipe and ``--section.key value`` overrides.

Exit codes: 0 done; 2 a mistake that the user can mend (one line on stderr); 130 interrupted; 1 with a
traceback: a fault of ours.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import textwrap
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream import __version__
from slipstream.errors import ConfigError, SlipstreamError

if TYPE_CHECKING:
    from rich.console import Console

    from slipstream.config import Recipe

Handler = Callable[[argparse.Namespace, list[str]], int]


def _settings_help() -> str:
    """List every setting with its default and its help text, read from the recipe's own dataclasses."""
    import ast
    import dataclasses
    import inspect
    from typing import get_type_hints

    from slipstream import config

    lines = ["settings (in the recipe as [section] key = value, or here as --section.key value):"]
    for section, cls in get_type_hints(config.Recipe).items():
        body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
        assert isinstance(body, ast.ClassDef)
        docs = {}
        for field, text in zip(body.body, body.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                assert isinstance(field.target, ast.Name)
                docs[field.target.id] = " ".join(str(text.value.value).split())
        default = cls()
        lines.append(f"\n  [{section}] {inspect.getdoc(cls)}")
        for field_info in dataclasses.fields(cls):
            value = getattr(default, field_info.name)
            shown = "" if value in ("", None, (), {}) else f" (default {value})"
            if isinstance(value, bool):
                shown = f" true|false (default {str(value).lower()})"
            head = f"    --{section}.{field_info.name}{shown}"
            lines += [
                head,
                *textwrap.wrap(docs[field_info.name], 96, initial_indent=" " * 8, subsequent_indent=" " * 8),
            ]
    return "\n".join(lines)


class _Parser(argparse.ArgumentParser):
    """argparse with one-line errors."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise ConfigError(f"{message}; see `{self.prog} --help`")


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False)


def _recipe(args: argparse.Namespace, overrides: list[str]) -> Recipe:
    from slipstream.recipe import load_recipe

    recipe = load_recipe(args.recipe, overrides)
    if recipe.run.threads > 0:
        import torch

        torch.set_num_threads(recipe.run.threads)
    return recipe


def _prepare(args: argparse.Namespace, overrides: list[str]) -> int:
    from slipstream.preparation import prepare

    prepare(
        _recipe(args, overrides),
        show=args.show,
        regenerate_to=Path(args.output) if args.regenerate else None,
        sources="heldout" if args.heldout else "train",
        dry_run=args.dry_run,
        console=_console(),
    )
    return 0


def _train(args: argparse.Namespace, overrides: list[str]) -> int:
    from slipstream.preflight import cheap_checks
    from slipstream.training.plan import plan
    from slipstream.training.trainer import train

    recipe, console = _recipe(args, overrides), _console()
    if args.dry_run:
        from slipstream.recipe import recipe_as_toml

        console.print(recipe_as_toml(recipe), markup=False)
        for name, value in plan(recipe).items():
            console.print(f"{name:24s} {value}", markup=False, soft_wrap=True)
        return 0
    train(recipe, argv=sys.argv, resume=args.resume, console=console, preflight=cheap_checks(console))
    return 0


def _only(overrides: list[str], sections: tuple[str, ...], command: str) -> None:
    """Refuse settings that ``command`` would ignore: a finished run's shape and training are what they were."""
    for token in overrides:
        section = token.removeprefix("--").split(".")[0]
        if token.startswith("--") and "." in token and section not in sections:
            known = ", ".join(f"[{name}]" for name in sections)
            raise ConfigError(f"{token} has no effect on {command}, which takes settings of {known} only")


def _evaluate(args: argparse.Namespace, overrides: list[str]) -> int:
    from slipstream.evaluation import evaluate_path

    _only(overrides, ("run", "target", "data", "evaluation"), "evaluate")
    evaluate_path(
        Path(args.path),
        overrides,
        drafter=Path(args.drafter) if args.drafter else None,
        output=Path(args.output) if args.output else None,
        dry_run=args.dry_run,
        console=_console(),
    )
    return 0


def _export(args: argparse.Namespace, overrides: list[str]) -> int:
    from slipstream.export.zlab import export_run

    _only(overrides, ("run", "target"), "export")
    export_run(Path(args.path), Path(args.to), overrides, dry_run=args.dry_run, console=_console())
    return 0


def _preflight(args: argparse.Namespace, overrides: list[str]) -> int:
    from slipstream.preflight import CHECKS, run_preflight

    recipe = _recipe(args, overrides)
    if args.dry_run:
        _console().print(f"would check {', '.join(CHECKS)} with {recipe.target.path or 'no target'}", markup=False)
        return 0
    report = run_preflight(recipe, output=Path(args.output) if args.output else None, console=_console())
    return 0 if report.passed else 2


def _quickstart(args: argparse.Namespace, overrides: list[str]) -> int:
    from slipstream.quickstart import quickstart

    quickstart(overrides, dry_run=args.dry_run, console=_console())
    return 0


def _add(
    commands: argparse._SubParsersAction[_Parser], name: str, handler: Handler, summary: str, text: str
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name,
        help=summary,
        description=textwrap.dedent(text).strip(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--dry-run", action="store_true", help="print the resolved plan and stop")
    parser.set_defaults(handler=handler)
    return parser


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands. Unknown ``--section.key value`` arguments are left for the recipe."""
    parser = _Parser(
        prog="slipstream",
        description="Train a DFlash drafter for your model, and prove what a server will get from it.",
        epilog="First time? `slipstream quickstart` runs the whole line on a small real model, without a GPU.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"slipstream {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=_Parser)
    recipe_help = "recipe file (.toml); every setting can also be given as --section.key value"

    sub = _add(
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

    sub = _add(
        commands,
        "train",
        _train,
        "train a drafter",
        """
        Trains as the recipe says, into run.directory: metrics.jsonl, tensorboard/, checkpoints/, drafter/.
          slipstream train recipe.toml --dry-run                     what would run, and how large it is
          slipstream train recipe.toml --run.directory runs/second   another directory
          slipstream train recipe.toml --resume                      go on from the newest complete checkpoint
        """,
    )
    sub.add_argument("recipe", help=recipe_help)
    sub.add_argument("--resume", action="store_true", help="continue the run in run.directory exactly")

    sub = _add(
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

    sub = _add(
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

    sub = _add(
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
    sub.add_argument("--output", metavar="FILE", help="where the JSON report goes")

    sub = _add(
        commands,
        "quickstart",
        _quickstart,
        "the whole line on a small real model: train, measure, export",
        """
        Trains a drafter from scratch for SmolLM2-135M-Instruct on two CPU cores in three minutes, evaluates it,
        and exports it, all into runs/quickstart. An earlier runs/quickstart is renamed, never deleted.
        """,
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    # Transformers and datasets must not reach for the network on local paths, nor talk over our progress display.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    arguments = list(sys.argv[1:] if argv is None else argv)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _interrupt)  # as Ctrl-C: what is half-written is removed on the way out
    try:
        parser = build_parser()
        if "--help" in arguments or "-h" in arguments:
            wanted = [a for a in arguments if not a.startswith("-")]
            if wanted and wanted[0] in ("prepare", "train", "evaluate", "export", "preflight", "quickstart"):
                sub = parser._subparsers._group_actions[0].choices[wanted[0]]  # type: ignore[union-attr, index]
                sub.epilog = _settings_help()
        args, rest = parser.parse_known_args(arguments)
        if not hasattr(args, "handler"):
            parser.print_help()
            raise ConfigError("no command given; start with `slipstream quickstart`")
        if args.handler is _prepare:
            if args.regenerate and not args.output:
                raise ConfigError("--regenerate needs --output FILE for the new conversations")
            if args.output and not args.regenerate:
                raise ConfigError(
                    f"--output {args.output} is for --regenerate; packed rows go to the cache by themselves"
                )
            if args.show < 0:
                raise ConfigError(f"--show is {args.show}; give how many samples to print")
        return int(args.handler(args, rest))
    except SlipstreamError as error:
        print(f"slipstream: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("slipstream: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
