"""Make the conversations that teach the target to end its answers: documented functions, question by question.

    functions.bin, functions_mask.bin       token ids (uint16) and, for each, whether the assistant writes it (uint8)
    functions.jsonl                         the same pairs as text
    functions_prompts.jsonl                 training packages' pairs that are in no .bin: for the drafter's prompts
    functions_heldout.{bin,_mask.bin,jsonl} pairs of the held-out packages
    packed/functions_*.xz                   the training pairs, for a machine that is reached by few, small trips

A .bin is a row of conversations, each closed by ``<|endoftext|>``, after another; a row is ``ROW`` tokens, filled up
with ``<|endoftext|>``, and every row starts with a conversation, as a server's prompt does. Run after
``encode_corpus.py``, which empties ``packed/``.
"""

import argparse
import gc
import json
import lzma
import os
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from encode_corpus import BUILD, pack, sha256
from function_pairs import Pair, pairs_of
from tokenizers import Tokenizer

ROW = 512
MOST_USER, ANSWER = 200, (12, 200)  # tokens
PACKAGE_SHARE = 0.03  # of all pairs: no package gives more
PROMPTS, PROMPTS_PER_PACKAGE = 3500, 15  # kept out of the training pairs
BATCH = 4096
OPEN_ROWS = 64  # that wait for a conversation that fits


class Encoded(NamedTuple):
    """A pair with the token ids of its two turns."""

    pair: Pair
    user: np.ndarray
    answer: np.ndarray


class Frame:
    """The chat template in token ids. The special tokens, and the line end before an answer, part the pieces, so that
    pieces encoded apart are what the tokenizer makes of the whole."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        start, end = tokenizer.token_to_id("<|im_start|>"), tokenizer.token_to_id("<|im_end|>")
        line_end = tokenizer.encode("\n").ids
        self.before = np.array([start, *tokenizer.encode("user\n").ids], dtype="<u2")
        self.between = np.array([end, *line_end, start, *tokenizer.encode("assistant").ids], dtype="<u2")
        self.end = np.array([end], dtype="<u2")
        self.after = np.array([*line_end, tokenizer.token_to_id("<|endoftext|>")], dtype="<u2")
        self.fill = tokenizer.token_to_id("<|endoftext|>")

    def conversation(self, encoded: Encoded) -> tuple[np.ndarray, np.ndarray]:
        """The ids of a whole conversation, its end-of-document token included, and their mask."""
        parts = (self.before, encoded.user, self.between, encoded.answer, self.end, self.after)
        written = (False, False, False, True, True, False)
        mask = np.concatenate([np.full(len(p), w, dtype=np.uint8) for p, w in zip(parts, written, strict=True)])
        return np.concatenate(parts), mask


def documents(path: Path) -> Iterator[dict[str, str]]:
    """The documents of a cleaned file."""
    with path.open(encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def unseen(pairs: Iterable[Pair], seen: set[str], dropped: Counter[str]) -> Iterator[Pair]:
    """The pairs whose body, and whose signature with docstring, did not come before."""
    for pair in pairs:
        if pair.head_key in seen or pair.body_key in seen:
            dropped["seen before"] += 1
            continue
        seen.update((pair.head_key, pair.body_key))
        yield pair


def ids_of(tokenizer: Tokenizer, texts: list[str]) -> list[np.ndarray]:
    """The token ids of texts."""
    return [np.array(e.ids, dtype="<u2") for e in tokenizer.encode_batch_fast(texts)]


def encode(tokenizer: Tokenizer, pairs: Iterable[Pair], dropped: Counter[str]) -> Iterator[Encoded]:
    """The pairs whose turns have a fit length; a question that is too long is asked with less."""
    stream = iter(pairs)
    while batch := list(islice(stream, BATCH)):
        users, answers = ids_of(tokenizer, [p.user for p in batch]), ids_of(tokenizer, [p.assistant for p in batch])
        for less in range(2):
            long = [n for n, ids in enumerate(users) if len(ids) > MOST_USER and len(batch[n].shorter) > less]
            for n, ids in zip(long, ids_of(tokenizer, [batch[n].shorter[less] for n in long]), strict=True):
                batch[n], users[n] = batch[n]._replace(user=batch[n].shorter[less]), ids
        for pair, user, answer in zip(batch, users, answers, strict=True):
            if len(user) > MOST_USER:
                dropped["long question"] += 1
            elif not ANSWER[0] <= len(answer) <= ANSWER[1]:
                dropped["short answer" if len(answer) < ANSWER[0] else "long answer"] += 1
            else:
                yield Encoded(pair, user, answer)


def capped(encoded: list[Encoded], most: float, dropped: Counter[str]) -> list[Encoded]:
    """The pairs in the order of their keys, at most so many of a package."""
    taken: Counter[str] = Counter()
    kept = []
    for item in sorted(encoded, key=lambda item: item.pair.key):
        if taken[item.pair.package] >= most:
            dropped["package's share"] += 1
            continue
        taken[item.pair.package] += 1
        kept.append(item)
    return kept


def part_prompts(encoded: list[Encoded], count: int, per_package: int) -> tuple[list[Encoded], list[Encoded]]:
    """Part pairs in key order into those to train on and ``count`` prompts, at most so many of a package."""
    taken: Counter[str] = Counter()
    trained: list[Encoded] = []
    prompts: list[Encoded] = []
    for item in encoded:
        if len(prompts) < count and taken[item.pair.package] < per_package:
            taken[item.pair.package] += 1
            prompts.append(item)
        else:
            trained.append(item)
    return trained, prompts


def rows(frame: Frame, encoded: Iterable[Encoded]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Rows of ``ROW`` ids with their masks: each conversation goes into the fullest open row that holds it."""
    open_rows: list[list[tuple[np.ndarray, np.ndarray]]] = []
    room: list[int] = []

    def closed(place: int) -> tuple[np.ndarray, np.ndarray]:
        items, left = open_rows.pop(place), room.pop(place)
        ids = np.concatenate([*(ids for ids, _ in items), np.full(left, frame.fill, dtype="<u2")])
        return ids, np.concatenate([*(mask for _, mask in items), np.zeros(left, dtype=np.uint8)])

    for item in encoded:
        ids, mask = frame.conversation(item)
        fitting = [(left, n) for n, left in enumerate(room) if left >= len(ids)]
        if fitting:
            place = min(fitting)[1]
            open_rows[place].append((ids, mask))
            room[place] -= len(ids)
            continue
        if len(open_rows) == OPEN_ROWS:
            yield closed(min(range(OPEN_ROWS), key=room.__getitem__))
        open_rows.append([(ids, mask)])
        room.append(ROW - len(ids))
    while open_rows:
        yield closed(0)


def write(frame: Frame, encoded: list[Encoded], build: Path, name: str) -> dict[str, Any]:
    """Write pairs as token rows and as text, and return what there is to know of them."""
    supervised = used = count = 0
    with (build / f"{name}.bin").open("wb") as tokens, (build / f"{name}_mask.bin").open("wb") as masks:
        for ids, mask in rows(frame, encoded):
            tokens.write(ids.tobytes())
            masks.write(mask.tobytes())
            count += 1
            supervised += int(mask.sum())
    used = sum(len(item.user) + len(item.answer) for item in encoded)
    used += len(encoded) * sum(map(len, (frame.before, frame.between, frame.end, frame.after)))
    write_text(encoded, build / f"{name}.jsonl")
    return {
        "pairs": len(encoded),
        "packages": len({item.pair.package for item in encoded}),
        "rows": count,
        "tokens": count * ROW,
        "filled": round(used / max(count * ROW, 1), 4),
        "supervised": supervised,
        "sha256": sha256(build / f"{name}.bin"),
        "mask_sha256": sha256(build / f"{name}_mask.bin"),
    }


def write_text(encoded: list[Encoded], path: Path) -> None:
    """Write pairs as JSON lines, with the length of their turns in tokens."""
    with path.open("w", encoding="utf-8") as file:
        for pair, user, answer in encoded:
            row: dict[str, Any] = {"package": pair.package, "file": pair.file, "function": pair.name}
            row |= {"user": pair.user, "assistant": pair.assistant}
            row |= {"user_tokens": len(user), "assistant_tokens": len(answer)}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def pack_parts(build: Path) -> list[dict[str, Any]]:
    """Compress the training rows into parts, and their mask whole: it is next to nothing."""
    packed = build / "packed"
    packed.mkdir(exist_ok=True)
    for old in packed.glob("functions_*.xz"):
        old.unlink()
    parts = pack(build / "functions.bin", packed, "functions_")
    mask = packed / "functions_mask.xz"
    mask.write_bytes(lzma.compress((build / "functions_mask.bin").read_bytes(), preset=3))
    return [*parts, {"file": mask.name, "bytes": mask.stat().st_size, "sha256": sha256(mask)}]


def main() -> None:
    """Find, encode, cap, part, write, pack. Held-out packages come first: what repeats them is not trained on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=BUILD, help="where the other steps worked")
    parser.add_argument("--sample", type=int, default=1, help="look at one training file in so many")
    args = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.simplefilter("ignore")  # other people's escape sequences
    gc.disable()  # trees of syntax hold no cycles, and the collector would walk every one of them
    tokenizer_file = args.build / "tokenizer" / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    frame = Frame(tokenizer)
    seen: set[str] = set()
    manifest: dict[str, Any] = {"tokenizer_sha256": sha256(tokenizer_file), "row": ROW}
    for role in ("heldout", "train"):
        dropped: Counter[str] = Counter()
        step = args.sample if role == "train" else 1
        sources = islice(documents(args.build / "clean" / f"{role}.jsonl"), 0, None, step)
        pairs = (pair for document in sources for pair in pairs_of(document))
        encoded = list(encode(tokenizer, unseen(pairs, seen, dropped), dropped))
        if role == "heldout":
            name, kept = "functions_heldout", capped(encoded, len(encoded), dropped)
        else:
            name, kept = "functions", capped(encoded, PACKAGE_SHARE * len(encoded), dropped)
            kept, prompts = part_prompts(kept, PROMPTS, PROMPTS_PER_PACKAGE)
            write_text(prompts, args.build / "functions_prompts.jsonl")
            manifest["prompts"] = {"pairs": len(prompts), "packages": len({item.pair.package for item in prompts})}
        manifest[name] = {**write(frame, kept, args.build, name), "dropped": dict(dropped)}
        if role == "train":
            manifest["functions"]["parts"] = pack_parts(args.build)
    text = json.dumps(manifest, indent=1) + "\n"
    for folder in (args.build, args.build / "packed"):
        (folder / "functions_manifest.json").write_text(text, encoding="utf-8")
    print(text, end="")


if __name__ == "__main__":
    main()
