"""A tiny target, conversations and a recipe around them, for tests that train. ``main`` trains in its own process."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path
from typing import Any

from slipstream.config import Recipe
from slipstream.recipe import load_recipe

SETTINGS = {
    "data.row_length": 160,
    "drafter.layers": 2,
    "drafter.block_size": 8,
    "training.anchors": 24,
    "training.steps": 4,
    "training.log_every": 1,
    "training.evaluate_prompts": 2,
    "training.precision": "float32",
    "target.dtype": "float32",
    "evaluation.max_new_tokens": 12,
    "run.threads": 1,
}


def make_inputs(root: Path) -> Path:
    """Write a target and conversations below ``root`` and return it."""
    from support.tiny import save_tiny_target, write_conversations

    save_tiny_target(root / "target")
    write_conversations(root / "train.jsonl", 20)
    write_conversations(root / "heldout.jsonl", 3)
    return root


def overrides(root: Path, run: Path | str, **changes: Any) -> list[str]:
    """Return override arguments of a small run; ``changes`` are ``section__key`` names."""
    values = {
        "target.path": root / "target",
        "data.train": root / "train.jsonl",
        "run.directory": run,
        **SETTINGS,
        **{name.replace("__", "."): value for name, value in changes.items()},
    }
    return [part for name, value in values.items() for part in (f"--{name}", str(value))]


def tiny_recipe(root: Path, run: Path | str, **changes: Any) -> Recipe:
    """Return the recipe of a small run."""
    return load_recipe(None, overrides(root, run, **changes))


def command(arguments: list[str], *, resume: bool = False) -> tuple[list[str], dict[str, str]]:
    """Return (argv, environment) of a real process that trains with these overrides."""
    here = Path(__file__).resolve()
    source = here.parents[2] / "src"
    path = [str(source), str(here.parents[1]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path)), "OMP_NUM_THREADS": "1"}
    program = "from support.tiny_run import main; main()"
    return [sys.executable, "-c", program, *(["--resume"] if resume else []), *arguments], environment


def quiet_train(recipe: Recipe, **options: Any) -> tuple[Any, str]:
    """Train in this process; return the summary and what was printed."""
    from rich.console import Console

    from slipstream.training.trainer import train

    console = Console(file=io.StringIO(), width=200)
    summary = train(recipe, console=console, **options)
    return summary, console.file.getvalue()  # type: ignore[attr-defined]


def lines(run: Path, kind: str = "train") -> list[dict[str, Any]]:
    """Return the lines of ``metrics.jsonl`` of a kind."""
    text = (run / "metrics.jsonl").read_text(encoding="utf-8")
    return [row for row in map(json.loads, text.splitlines()) if row["kind"] == kind]


def main() -> None:
    """Train; exit as the command line does."""
    import signal

    from slipstream.errors import SlipstreamError
    from slipstream.training.trainer import train

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job would be told to ignore it
    arguments = sys.argv[1:]
    resume = arguments[:1] == ["--resume"]
    try:
        train(load_recipe(None, arguments[resume:]), argv=sys.argv, resume=resume)
    except SlipstreamError as error:
        print(f"slipstream: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
