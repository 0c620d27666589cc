"""What makes acceptance grow: drafters that differ in one setting, trained for the same minutes on the same device.

    python benchmarks/quality.py plan.toml --out DIRECTORY [--part 1/2] [--turn FILE] [--section.key value ...]

A plan names a recipe, the minutes of each training, and rows of settings; every row is trained once for each of its
seeds and decoded on the held-out prompts. ``results.jsonl`` has a line for each training, written as it ends: called
again, what is there is not done again. ``--part i/n`` does every n-th training, for machines of several GPUs. At the
end, and with ``--table`` alone, the table: acceptance length of each row, and how it compares with the row ``base``.

    recipe = "recipes/embedded.toml"
    minutes = 1.0
    [[rows]]
    name = "base"
    seeds = [0, 1]
    [[rows]]
    name = "block 16"
    settings = { "drafter.block_size" = 16 }

Minutes are training's own: loading, compiling (the first steps) and decoding are not counted. With ``--turn FILE``
several processes share a device and only one of them trains at a time, while the others load, compile or decode: each
row has the device for its minutes, but for what those do there, which is about the same for all.
"""

from __future__ import annotations

import argparse
import fcntl
import gc
import json
import shutil
import statistics
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

from rich.console import Console

from slipstream.errors import SlipstreamError
from slipstream.recipe import load_recipe
from slipstream.training.loop import Trainer

BASE = "base"
FIRST_STEPS = 5  # compiled and tuned by then


class Turn:
    """A file that one process at a time holds while it trains. A dead holder lets go. Without a file nobody waits."""

    def __init__(self, path: Path | None) -> None:
        self._file = None if path is None else path.open("a")

    def take(self) -> None:
        """Wait until no other process holds it."""
        if self._file is not None:
            fcntl.flock(self._file, fcntl.LOCK_EX)

    def give(self) -> None:
        """Let another process have it."""
        if self._file is not None:
            fcntl.flock(self._file, fcntl.LOCK_UN)


def clocked(turn: Turn) -> type[Trainer]:
    """Return a training loop whose time begins when its first steps are done and the turn is its own."""

    class Clocked(Trainer):
        def elapsed(self) -> float:
            return super().elapsed() if self.step >= FIRST_STEPS else 0.0

        def finished(self) -> bool:
            if self.step < FIRST_STEPS:  # however long it compiles
                return self.run.steps is not None and self.step >= self.run.steps
            return super().finished()

        def train_step(self) -> None:
            super().train_step()
            if self.step == FIRST_STEPS:
                self.check_fault()  # waits for the device
                turn.take()
                self.restart_clock()

    return Clocked


def read_plan(path: Path) -> dict[str, Any]:
    """Return the plan, its recipe's path made absolute. Exits for one that cannot be used."""
    plan = tomllib.loads(path.read_text(encoding="utf-8"))
    names = [row["name"] for row in plan["rows"]]
    if len(set(names)) < len(names) or BASE not in names:
        raise SystemExit(f"{path}: rows need names of their own, and one of them must be {BASE}")
    recipe = Path(plan["recipe"])
    plan["recipe"] = str(recipe if recipe.is_absolute() else path.parent / recipe)
    return plan


def trainings(plan: dict[str, Any]) -> list[tuple[str, int, dict[str, Any]]]:
    """Return (name, seed, settings) of every training, first seeds first."""
    found = [
        (place, seed, row["name"], plan.get("settings", {}) | row.get("settings", {}))
        for row in plan["rows"]
        for place, seed in enumerate(row.get("seeds", [0]))
    ]
    return [(name, seed, settings) for _, seed, name, settings in sorted(found, key=lambda item: item[0])]


def arguments(settings: dict[str, Any]) -> list[str]:
    """Return the settings as command-line overrides."""
    out: list[str] = []
    for name, value in settings.items():
        values = value if isinstance(value, list) else [str(value).lower() if isinstance(value, bool) else value]
        out += [f"--{name}", *map(str, values)]
    return out


def train_and_measure(
    plan: dict[str, Any], name: str, seed: int, overrides: list[str], run: Path, turn: Turn
) -> dict[str, Any]:
    """Train one drafter into ``run`` and decode with it; return what the table needs and what explains it."""
    import torch

    from slipstream.evaluation.measure import evaluate_drafter, evaluation_dtype
    from slipstream.training.hardware import resolve_device
    from slipstream.training.trainer import train

    fixed = {"run.directory": run, "run.seed": seed, "training.max_minutes": plan["minutes"]}
    recipe = load_recipe(plan["recipe"], [*overrides, *arguments(fixed)])
    console = Console(highlight=False)
    began = time.monotonic()
    try:
        summary = train(recipe, argv=sys.argv, console=console, loop=clocked(turn))
    finally:
        turn.give()
    trained = time.monotonic()
    device = resolve_device(recipe.run.device)
    result = evaluate_drafter(
        recipe, summary.drafter, device=device, dtype=evaluation_dtype(recipe, device), console=console
    )
    told = result.as_json()
    return {
        "name": name,
        "seed": seed,
        "overrides": overrides,
        "tau": told["tau"],
        "tau_per_response": told["tau_per_response"],
        "acceptance_by_position": told["acceptance_by_position"],
        "baselines": told["baselines"],
        "block_size": told["block_size"],
        "prompts": told["prompts"],
        "steps": summary.steps,
        "tokens": summary.metrics.get("tokens"),
        "epoch": summary.metrics.get("epoch"),
        "loss": summary.metrics.get("loss"),
        "train_tf_acceptance": summary.metrics.get("teacher_forced_acceptance_length"),
        "training_seconds": round(summary.elapsed, 1),
        "other_seconds": round(trained - began - summary.elapsed, 1),  # loading, compiling, waiting for the turn
        "evaluation_seconds": round(time.monotonic() - trained, 1),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
    }


def table(results: list[dict[str, Any]]) -> str:
    """Return the results as a Markdown table, rows in the order in which they were first measured."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        rows.setdefault(result["name"], []).append(result)
    base = statistics.mean(r["tau"] for r in rows[BASE]) if BASE in rows else None
    lines = [
        "| row | seeds | tau | against base | steps | passes over the data | by position |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, found in rows.items():
        tau = statistics.mean(r["tau"] for r in found)
        taus = ", ".join(f"{r['tau']:.3f}" for r in found)
        each = f" ({taus})" if len(found) > 1 else ""
        against = "" if base is None or name == BASE else f"{tau - base:+.3f}"
        places = " ".join(f"{p:.2f}" for p in found[0]["acceptance_by_position"][:7])
        epoch = statistics.mean(r["epoch"] or 0.0 for r in found)
        steps = round(statistics.mean(r["steps"] for r in found))
        lines.append(f"| {name} | {len(found)} | {tau:.3f}{each} | {against} | {steps:,} | {epoch:.1f} | {places} |")
    return "\n".join(lines)


def read_results(path: Path) -> list[dict[str, Any]]:
    """Return what is in a results file, or nothing."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []


def main() -> None:
    """Do what is left of the plan and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", default="1/1", help="i/n: every n-th training, from the i-th")
    parser.add_argument("--turn", type=Path, help="a file: of the processes that name it only one trains at a time")
    parser.add_argument("--table", action="store_true", help="print the table of what is there, train nothing")
    parser.add_argument(
        "--stop-after", type=float, default=float("inf"), help="begin no training after so many minutes"
    )
    args, overrides = parser.parse_known_args()
    part, parts = map(int, args.part.split("/"))
    results = args.out / "results.jsonl"
    args.out.mkdir(parents=True, exist_ok=True)
    began, turn = time.monotonic(), Turn(args.turn)
    plan = read_plan(args.plan)
    done = {(r["name"], r["seed"]) for r in read_results(results)}
    left = [t for i, t in enumerate(trainings(plan)) if i % parts == part - 1 and t[:2] not in done]
    for number, (name, seed, settings) in enumerate([] if args.table else left):
        if time.monotonic() - began > args.stop_after * 60:
            print(f"{len(left) - number} trainings are left; call again", flush=True)
            break
        print(f"== {number + 1} of {len(left)}: {name}, seed {seed}", flush=True)
        run = args.out / "runs" / f"{name.replace(' ', '-').replace('/', '-')}-{seed}"
        shutil.rmtree(run, ignore_errors=True)
        try:
            result = train_and_measure(plan, name, seed, [*arguments(settings), *overrides], run, turn)
        except SlipstreamError as error:  # a row that cannot be trained must not cost the others
            print(f"{name}, seed {seed}: {error}", file=sys.stderr, flush=True)
            continue
        with results.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(result) + "\n")
        shutil.rmtree(run / "checkpoints", ignore_errors=True)
        gc.collect()
    print(table(read_results(results)))


if __name__ == "__main__":
    main()
