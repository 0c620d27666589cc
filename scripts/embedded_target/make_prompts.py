"""Make the drafter's prompts: functions that the target was not taught to complete, as conversations.

Reads ``functions_prompts.jsonl``, which ``make_functions.py`` kept out of its training pairs, and
``functions_heldout.jsonl``, of packages that the target never saw. Writes ``prompts_train.jsonl`` and
``prompts_heldout.jsonl``: a user message, and where it is from. (The files that the training prompts are from are in
the target's corpus all the same, as text among other text.) ``prompts_more.jsonl`` has the questions of pairs that the
target was taught, for a drafter that is to see many: what is learned from is what the target answers, not the pair.
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterable
from itertools import zip_longest
from pathlib import Path
from typing import Any

BUILD = Path(__file__).resolve().parents[2] / "build" / "embedded_target"
LENGTHS = (40, 60, 80, 105, 140)  # tokens of a question: where one group of lengths ends and the next begins


def read_pairs(path: Path) -> list[dict[str, Any]]:
    """The pairs of a file of ``make_functions.py``, which are in an order drawn by hash."""
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def of_all_lengths(pairs: Iterable[dict[str, Any]], count: int, cap: int) -> list[dict[str, Any]]:
    """So many pairs, from every group of lengths in turn, at most ``cap`` of a package."""
    groups: list[list[dict[str, Any]]] = [[] for _ in range(len(LENGTHS) + 1)]
    for pair in pairs:
        groups[sum(pair["user_tokens"] > end for end in LENGTHS)].append(pair)
    taken: Counter[str] = Counter()
    chosen: list[dict[str, Any]] = []
    for turn in zip_longest(*groups):
        for pair in turn:
            if pair is not None and len(chosen) < count and taken[pair["package"]] < cap:
                taken[pair["package"]] += 1
                chosen.append(pair)
    return chosen


def conversation(pair: dict[str, Any]) -> dict[str, Any]:
    """The row of a prompt."""
    message = {"role": "user", "content": pair["user"]}
    return {"messages": [message], "package": pair["package"], "file": pair["file"], "function": pair["function"]}


def main() -> None:
    """Choose and write both files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=BUILD, help="where the other steps worked")
    parser.add_argument("--train", type=int, default=3000)
    parser.add_argument("--heldout", type=int, default=600)
    parser.add_argument("--more", type=int, default=80_000)
    args = parser.parse_args()
    for role, source, count, cap in (
        ("train", "functions_prompts", args.train, 15),
        ("heldout", "functions_heldout", args.heldout, 80),
        ("more", "functions", args.more, 4000),
    ):
        chosen = of_all_lengths(read_pairs(args.build / f"{source}.jsonl"), count, cap)
        with (args.build / f"prompts_{role}.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(conversation(pair), ensure_ascii=False) + "\n" for pair in chosen)
        lengths = sorted(pair["user_tokens"] for pair in chosen)
        deciles = [lengths[(len(lengths) - 1) * tenth // 10] for tenth in range(11)]
        packages = Counter(pair["package"] for pair in chosen)
        print(f"{role}: {len(chosen)} prompts of {len(packages)} packages, at most {max(packages.values())} of one")
        print(f"  tokens of a question, by tenths: {deciles}")


if __name__ == "__main__":
    main()
