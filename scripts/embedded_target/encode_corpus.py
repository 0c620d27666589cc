"""Encode the cleaned text into token files, and pack them for a machine that is reached by few, small trips.

``train.bin`` and ``heldout.bin`` are little-endian uint16 token ids, every document between two ``<|endoftext|>``;
training documents are shuffled whole. ``packed/`` holds the same in xz parts, each of which unpacks on its own, and the
manifest. A trainer concatenates as many parts as it has: every part is a random sample of the documents.
"""

import argparse
import hashlib
import json
import lzma
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from audit_packages import read_table
from tokenizers import Tokenizer

BUILD = Path(__file__).resolve().parents[2] / "build" / "embedded_target"
PART_BYTES = 55_000_000
CHUNK = 1 << 20  # tokens fed to the compressor at a time: how far a part may run over
# Tokens are two bytes wide, so the compressor models the low and the high byte apart (lp, pb). A higher preset takes
# several times as long for a few per cent.
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 3, "dict_size": 1 << 26, "lc": 3, "lp": 1, "pb": 1}]


def encode(tokenizer: Tokenizer, path: Path, batch: int = 256) -> Iterator[np.ndarray]:
    """The token ids of each document of a cleaned file, the end-of-document token after them."""
    end = tokenizer.token_to_id("<|endoftext|>")
    texts: list[str] = []
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            texts.append(json.loads(line)["text"])
            if len(texts) == batch:
                yield from (np.array([*e.ids, end], dtype="<u2") for e in tokenizer.encode_batch_fast(texts))
                texts.clear()
    yield from (np.array([*e.ids, end], dtype="<u2") for e in tokenizer.encode_batch_fast(texts))


def write(documents: list[np.ndarray], order: np.ndarray, end: int, path: Path) -> int:
    """Write the documents in an order, an end-of-document token before the first, and return the tokens."""
    with path.open("wb") as file:
        file.write(np.array([end], dtype="<u2").tobytes())
        for number in order:
            file.write(documents[number].tobytes())
    return path.stat().st_size // 2


def part_name(number: int) -> str:
    """part_aa, part_ab, …: they sort as they follow."""
    return f"part_{chr(ord('a') + number // 26)}{chr(ord('a') + number % 26)}"


def pack(source: Path, folder: Path, prefix: str = "") -> list[dict[str, Any]]:
    """Compress a token file into parts of at most about ``PART_BYTES``, each of its own."""
    tokens = np.memmap(source, dtype="<u2", mode="r")
    parts: list[dict[str, Any]] = []
    place = 0
    while place < len(tokens):
        start, name = place, f"{prefix}{part_name(len(parts))}.xz"
        compressor = lzma.LZMACompressor(filters=FILTERS)
        with (folder / name).open("wb") as file:
            while place < len(tokens) and file.tell() < PART_BYTES:
                file.write(compressor.compress(tokens[place : place + CHUNK].tobytes()))
                place = min(place + CHUNK, len(tokens))
            file.write(compressor.flush())
        parts.append({"file": name, "tokens": place - start, "bytes": (folder / name).stat().st_size})
        parts[-1]["sha256"] = sha256(folder / name)
    return parts


def sha256(path: Path) -> str:
    """The file's SHA-256."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main() -> None:
    """Encode, shuffle, write, pack."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=BUILD, help="where the other steps worked")
    parser.add_argument("--seed", type=int, default=0, help="of the shuffle")
    args = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    tokenizer_file = args.build / "tokenizer" / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    end = tokenizer.token_to_id("<|endoftext|>")
    packed = args.build / "packed"
    packed.mkdir(exist_ok=True)
    for old in packed.glob("*.xz"):
        old.unlink()
    manifest: dict[str, Any] = {
        "tokenizer_sha256": sha256(tokenizer_file),
        "vocabulary": tokenizer.get_vocab_size(),
        "dtype": "uint16, little-endian",
        "shuffle": f"numpy default_rng({args.seed}).permutation of the training documents",
    }
    for role in ("train", "heldout"):
        documents = list(encode(tokenizer, args.build / "clean" / f"{role}.jsonl"))
        order = np.arange(len(documents))
        if role == "train":
            order = np.random.default_rng(args.seed).permutation(len(documents))
        path = args.build / f"{role}.bin"
        count = write(documents, order, end, path)
        parts = pack(path, packed, "" if role == "train" else "heldout_")
        rows = [row for row in read_table() if row.role == role]
        manifest[role] = {
            "documents": len(documents),
            "tokens": count,
            "text_bytes": sum(row.bytes for row in rows),
            "sha256": sha256(path),
            "parts": parts,
            "packages": {f"{row.name} {row.version}": row.bytes for row in rows if row.bytes},
        }
        print(f"{role}: {len(documents):,} documents, {count:,} tokens, {len(parts)} parts")
        for part in parts:
            print(f"  {part['file']}: {part['bytes'] / 1e6:.1f} MB, {part['tokens']:,} tokens")
    for folder in (args.build, packed):
        (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
