"""Put what a training made into the package: target, drafter, data, and how the run went.

    python scripts/ship_pair.py embedded --run RUN --export DIR --target DIR --answers FILE --heldout FILE

Writes below ``src/slipstream/pairs/<pair>``; its ``recipe.toml`` stays as it is. Refuses a drafter that was made for
another target or measured with other weights, a run without an evaluation, and more than the package may hold. Of the
run's records only what tells how it went is kept: no directories of the machine, no host, no process.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import shutil
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from slipstream.data.conversations import read_conversations
from slipstream.data.journal import write_whole
from slipstream.drafter.store import weights_digest
from slipstream.target.digest import directory_digest

PAIRS = Path(__file__).resolve().parents[1] / "src" / "slipstream" / "pairs"
MOST_BYTES = {"embedded": 45_000_000, "smollm2": 20_000_000}  # target and drafter together
RECORDED = ("run_id", "seeds", "started", "git", "versions", "torch", "device_name", "identity", "resumed")
TARGET_FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
                "chat_template.jinja")  # fmt: skip
DRAFTER_FILES = ("config.json", "model.safetensors", "README.md")
MOST_LINES = 300
PACKAGES = Path(__file__).resolve().parent / "embedded_target" / "packages.csv"
NOTICE = """# Where the embedded pair's text is from

The target learned from the source code of the packages below, in the versions named, and the prompts are signatures and
docstrings of functions in them. Each is under a permissive licence; its text and copyright notices are in the package
itself. `scripts/embedded_target` in the repository holds the audit and every step from the packages to the weights.

| package | version | licence | used for |
|---|---|---|---|
"""


def thinned_metrics(lines: Iterable[str]) -> list[str]:
    """Return the evaluations, the training line before each, the last one, and others evenly spread up to a limit."""
    rows = [(json.loads(line), line.strip()) for line in lines]
    kinds = [row["kind"] for row, _ in rows]
    kept = {i for i, kind in enumerate(kinds) if kind == "evaluation"}
    kept |= {max((j for j in range(i) if kinds[j] == "train"), default=i) for i in kept}
    kept.add(len(rows) - 1)
    every = max(len(rows) // MOST_LINES, 1)
    kept |= set(range(0, len(rows), every))
    return [rows[i][1] for i in sorted(kept)]


def last_step(metrics: Path) -> int:
    """Return the last step of a run."""
    with metrics.open(encoding="utf-8") as lines:
        return max(int(json.loads(line)["step"]) for line in lines)


def scrubbed_run(record: dict[str, Any]) -> dict[str, Any]:
    """Return what of ``run.json`` tells how a run went, without where on which machine."""
    found = {name: record[name] for name in RECORDED if name in record}
    found["resumed"] = len(found.get("resumed", []))
    return found


def scrubbed_recipe(text: str, *, target: str, train: str, heldout: str) -> str:
    """Return the recipe with the names that its files have in the package."""
    from slipstream.config import Recipe
    from slipstream.recipe import recipe_as_toml

    names = {"directory": f"runs/{target}", "path": target}
    lists = {"train": [train], "heldout": [heldout]}
    lines = []
    for line in text.splitlines():
        name = line.partition(" = ")[0]
        if name in names:
            line = f"{name} = {json.dumps(names[name])}"
        elif name in lists:
            line = f"{name} = {json.dumps(lists[name])}"
        lines.append(line)
    tree = tomllib.loads("\n".join(lines))
    assert set(tree) <= set(tomllib.loads(recipe_as_toml(Recipe())))
    return "\n".join(lines) + "\n"


def scrubbed_evaluation(record: dict[str, Any], *, target: str, heldout: str) -> dict[str, Any]:
    """Return the evaluation with the names that its files have in the package."""
    return {**record, "drafter": "drafter", "target": target, "heldout": [heldout], "overrides": []}


def copied(source: Path, names: Iterable[str], to: Path) -> int:
    """Copy the files that are there into a new directory; return their bytes."""
    shutil.rmtree(to, ignore_errors=True)
    to.mkdir(parents=True)
    total = 0
    for name in names:
        if (source / name).is_file():
            shutil.copyfile(source / name, to / name)
            total += (to / name).stat().st_size
    return total


def notice(packages: Path) -> str:
    """Return the notice: every package of the audit with its version, licence and use."""
    uses = {"train": "training", "heldout": "held-out prompts"}
    with packages.open(encoding="utf-8", newline="") as stream:
        rows = [
            f"| {row['name']} | {row['version']} | {row['licence']} | {uses.get(row['role'], row['role'])} |"
            for row in csv.DictReader(stream)
        ]
    return NOTICE + "\n".join(rows) + "\n"


def main() -> None:
    """Check, copy and tell the sizes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pair", choices=tuple(MOST_BYTES))
    parser.add_argument("--run", type=Path, required=True, help="run directory, evaluated")
    parser.add_argument("--export", type=Path, required=True, help="its export")
    parser.add_argument("--target", type=Path, help="the target's directory, where it is to be shipped")
    parser.add_argument("--answers", type=Path, required=True, help="prompts with the target's own answers")
    parser.add_argument("--heldout", type=Path, required=True, help="chosen held-out prompts, their report beside them")
    parser.add_argument("--count", type=int, default=2000, help="answers to ship")
    args = parser.parse_args()
    pair = PAIRS / args.pair
    evaluation = json.loads((args.run / "evaluation.json").read_text(encoding="utf-8"))
    if evaluation["drafter_digest"] != weights_digest(args.run / "drafter"):
        raise SystemExit(f"{args.run / 'evaluation.json'} measured other weights; evaluate the run again")
    card = (args.export / "README.md").read_text(encoding="utf-8")
    if evaluation["target_digest"] not in card:
        raise SystemExit(f"{args.export} was exported for another target than {args.run} was evaluated with")

    size = copied(args.export, DRAFTER_FILES, pair / "drafter")
    if args.target is not None:
        size += copied(args.target, TARGET_FILES, pair / "target")
    if size > MOST_BYTES[args.pair]:
        raise SystemExit(f"target and drafter are {size:,} bytes; the package holds {MOST_BYTES[args.pair]:,} of them")
    if args.target is not None and (digest := directory_digest(pair / "target")) != evaluation["target_digest"]:
        raise SystemExit(f"the target as shipped ({digest[:12]}) is not the one that {args.run} was evaluated with")
    card = card.replace(str(args.export), f"slipstream/pairs/{args.pair}/drafter")
    if args.target is not None:
        card = card.replace(str(args.target), f"slipstream/pairs/{args.pair}/target")
    if args.target is not None:
        (pair / "NOTICE.md").write_text(notice(PACKAGES), encoding="utf-8")
    # Where the checkpoints stayed behind, the export does not know the step; the metrics do.
    card = card.replace("step not recorded", f"step {last_step(args.run / 'metrics.jsonl')}")
    (pair / "drafter" / "README.md").write_text(card, encoding="utf-8")

    run = pair / "run"
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir()
    train, heldout = "answers_train.jsonl.gz", "prompts_heldout.jsonl.gz"
    recipe = scrubbed_recipe(
        (args.run / "recipe.toml").read_text(encoding="utf-8"), target=args.pair, train=train, heldout=heldout
    )
    (run / "recipe.toml").write_text(recipe, encoding="utf-8")
    with (args.run / "metrics.jsonl").open(encoding="utf-8") as lines:
        (run / "metrics.jsonl").write_text("\n".join(thinned_metrics(lines)) + "\n", encoding="utf-8")
    for name, tree in (
        ("run.json", scrubbed_run(json.loads((args.run / "run.json").read_text(encoding="utf-8")))),
        ("evaluation.json", scrubbed_evaluation(evaluation, target=args.pair, heldout=heldout)),
    ):
        (run / name).write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")

    with (gzip.open if args.answers.suffix == ".gz" else open)(args.answers, "rt", encoding="utf-8") as lines:
        rows = [line for _, line in zip(range(args.count), lines, strict=False)]
    write_whole(pair / train, "".join(rows).encode())
    with (gzip.open if args.heldout.suffix == ".gz" else open)(args.heldout, "rt", encoding="utf-8") as lines:
        write_whole(pair / heldout, lines.read().encode())
    shutil.copyfile(f"{args.heldout}.report.json", run / "heldout.json")
    counts = [sum(1 for _ in read_conversations([str(pair / name)])) for name in (train, heldout)]
    data = sum((pair / name).stat().st_size for name in (train, heldout))
    print(
        f"{args.pair}: weights {size:,} bytes, {counts[0]} answers and {counts[1]} held-out prompts in {data:,} bytes"
    )


if __name__ == "__main__":
    main()
