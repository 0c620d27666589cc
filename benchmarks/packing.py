"""Reading a target's context features: documents alone, and whole rows in one pass in each way that its layers allow.

    python benchmarks/packing.py TARGET [--rows 4] [--row-length 512] [--documents 60 200] [--dtype float32]

The ways take turns, batch by batch, and have the same batches; what a way tunes at first is not counted. Tokens are
those of documents, not padding. CPU seconds stand beside the wall's, which other work on the machine disturbs.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence

import torch

from slipstream.config import TargetConfig
from slipstream.records import PackedBatch
from slipstream.target import features
from slipstream.target.features import FeatureReader
from slipstream.target.model import Target, load_target, tokenizer_entries
from slipstream.target.recurrent import WAYS


def random_batch(
    index: int, rows: int, tokens: int, lengths: Sequence[int], entries: int, draw: random.Random
) -> PackedBatch:
    """Return rows of documents of ``lengths[0]`` to ``lengths[1]`` random tokens, until one does not fit."""
    ids = torch.tensor([draw.randrange(entries) for _ in range(rows * tokens)]).view(rows, tokens)
    documents, positions = torch.full_like(ids, -1), torch.zeros_like(ids)
    number = 0
    for row in range(rows):
        start = 0
        while (length := draw.randint(lengths[0], lengths[1])) <= tokens - start:
            place = (row, slice(start, start + length))
            documents[place], positions[place] = number, torch.arange(length)
            number, start = number + 1, start + length
    return PackedBatch(index=index, ids=ids, loss_mask=documents >= 0, document_ids=documents, positions=positions)


def readers_of(target: Target, layers: Sequence[int]) -> dict[str, FeatureReader]:
    """Return a reader for each way that the target can be read, by what it calls it."""
    found = {"unpacked": FeatureReader(target, layers, "unpacked")}
    chosen = FeatureReader(target, layers)
    found[chosen.packing] = chosen
    if chosen.recurrent == WAYS[0]:  # the others, too
        features.WAYS = WAYS[1:]  # type: ignore[attr-defined]
        try:
            other = FeatureReader(target, layers)
        finally:
            features.WAYS = WAYS  # type: ignore[attr-defined]
        found[other.packing] = other
    return found


def seconds(reader: FeatureReader, batch: PackedBatch) -> tuple[float, float]:
    """Return the wall and the CPU seconds of one batch."""
    wall, cpu = time.monotonic(), time.process_time()
    reader.read(batch)  # its check for finite features waits for the device
    return time.monotonic() - wall, time.process_time() - cpu


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--row-length", type=int, default=512)
    parser.add_argument("--documents", type=int, nargs=2, default=(60, 200), metavar=("SHORTEST", "LONGEST"))
    parser.add_argument("--batches", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--attention", default="sdpa")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    config = TargetConfig(path=args.target, dtype=args.dtype, attention=args.attention)
    target = load_target(config, device=torch.device(args.device))
    draw = random.Random(0)
    entries = tokenizer_entries(target.tokenizer)
    batches = [random_batch(n, args.rows, args.row_length, args.documents, entries, draw) for n in range(args.batches)]
    tokens = sum(int((batch.document_ids >= 0).sum()) for batch in batches)
    readers = readers_of(target, (target.info.num_layers - 2,))
    for reader in readers.values():
        print(f"{reader.packing}: {reader.reason or 'nothing to tell'}; probe within {reader.probe_difference:.1e}")
        for batch in batches:  # once without a clock: lengths that a kernel tunes for, too
            reader.read(batch)
    rounds: dict[str, list[tuple[float, float]]] = {name: [] for name in readers}
    for _ in range(args.rounds):
        spent = dict.fromkeys(readers, (0.0, 0.0))
        for batch in batches:
            for name, reader in readers.items():
                wall, cpu = seconds(reader, batch)
                spent[name] = (spent[name][0] + wall, spent[name][1] + cpu)
        for name, value in spent.items():
            rounds[name].append(value)
    first = [statistics.median(r[which] for r in rounds["unpacked"]) for which in (0, 1)]
    print(
        f"{tokens} tokens in {len(batches)} batches of {args.rows} x {args.row_length}, median of {args.rounds} rounds"
    )
    print(f"{'tokens a second':44s} {'wall':>9s} {'ratio':>6s} {'CPU':>9s} {'ratio':>6s}")
    for name, spent_rounds in rounds.items():
        wall, cpu = (statistics.median(r[which] for r in spent_rounds) for which in (0, 1))
        print(f"{name:44s} {tokens / wall:9.0f} {first[0] / wall:6.2f} {tokens / cpu:9.0f} {first[1] / cpu:6.2f}")


if __name__ == "__main__":
    main()
