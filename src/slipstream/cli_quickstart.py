"""``slipstream quickstart`` on the command line."""

from __future__ import annotations

import argparse

from slipstream.cli_parts import Commands, Parser, add_command, console, given_path
from slipstream.errors import ConfigError
from slipstream.pairs import pairs


def _quickstart(args: argparse.Namespace, overrides: list[str]) -> int:
    from slipstream.quickstart.line import quickstart
    from slipstream.quickstart.settings import Choice
    from slipstream.usage import refuse_idle_settings

    if args.resume:
        refuse_idle_settings(overrides, "quickstart --resume")
        if args.target or args.start or args.prompts:
            raise ConfigError("--resume goes on with what the run began with: leave out --target, --from and --prompts")
    choice = Choice(
        pair=args.target or pairs()[0],
        start=args.start or "scratch",
        prompts=given_path(args.prompts, "--prompts"),
    )
    quickstart(overrides, choice=choice, resume=args.resume, dry_run=args.dry_run, console=console())
    return 0


def add_quickstart(commands: Commands[Parser]) -> None:
    """Add the command to the command line."""
    sub = add_command(
        commands,
        "quickstart",
        _quickstart,
        "the whole line on a small real model: train, measure, export",
        """
        Trains a drafter from scratch for a small target (a few minutes on a CPU), evaluates it, beside the drafter
        that was trained on a GPU where one is shipped, and exports it, all into runs/quickstart. An earlier
        runs/quickstart is renamed, never deleted.
          slipstream quickstart
          slipstream quickstart --target smollm2       SmolLM2-135M-Instruct, a public model
          slipstream quickstart --prompts mine.jsonl   the target answers your prompts, and they are trained on
          slipstream quickstart --from shipped         a drafter that is shipped is trained on
          slipstream quickstart --resume               go on with one that was interrupted
        """,
    )
    sub.add_argument("--target", choices=pairs(), help=f"which pair (default {pairs()[0]})")
    sub.add_argument(
        "--from",
        dest="start",
        choices=("scratch", "shipped"),
        help="where the drafter starts (default scratch)",
    )
    sub.add_argument("--prompts", metavar="FILE", default=None, help="train on your own prompts, a tenth held out")
    sub.add_argument("--resume", action="store_true", help="continue the quickstart in run.directory")
