"""Clean the fetched source: one JSON line for each file that is kept, and a count of why the others are not.

Files go one by one through rules about the file alone (``reason_against``), then through the search for copies. A copy
is found by windows of ten lines: a file most of whose windows were seen before, in any package, is left out. Held-out
packages come first and are kept apart, so that a training file that repeats them is what goes.
"""

import argparse
import ast
import hashlib
import json
import re
import warnings
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from audit_packages import Row, read_table, write_table
from licences import foreign_source

BUILD = Path(__file__).resolve().parents[2] / "build" / "embedded_target"
MIN_BYTES, MAX_BYTES = 400, 200_000
LONG_LINE, LONGEST_LINE = 300, 1000
WINDOW = 10  # lines
SAMPLE = 4  # one window in four is remembered, chosen by its hash: the same ones for every copy
MOST = 0.5  # of a file's windows seen before: a copy
HELD_OUT_SHARE = 0.15  # of a training file's windows found in held-out files: stricter, lest they leak

SQUEEZED, SQUEEZED_FROM = 0.12, 4000  # a file over so many bytes that zlib squeezes below this share repeats itself
# Tests are a quarter of what is published, much of it one call after another with other values. What is wanted is a
# model that writes functions and does not loop: one test file in three stays.
TEST_PATH = re.compile(r"(?:^|/)(?:_?tests?|testing|unit|functional)(?:/|_)|/test_|_tests?\.py$|(?:^|/)conftest\.py$")
TESTS_KEPT = 3

GENERATED = re.compile(
    r"do\s*not\s*(?:edit|modify)|generated\s+(?:by|from|with|code|file|using|automatically)"
    r"|auto-?\s?(?:matically)?[-\s]?generated|@generated|pb2",
    re.IGNORECASE,
)
STRING = re.compile(r"""[rbfu]?(?:"[^"]*"|'[^']*')""")
LITERAL_REST = re.compile(r"(?:[\s,:\[\](){}\d.+eExj_-]|None|True|False)*")
LICENCE_WORDS = re.compile(
    r"licen[sc]e|copyright|©|all rights reserved|permission|warrant|SPDX|redistribut|disclaim|authors?:", re.IGNORECASE
)
CODING = re.compile(r"^#.*coding[:=]|^#!|^#\s*(?:vi|vim|ex|emacs|pylint|flake8|fmt|isort|mypy|ruff):", re.IGNORECASE)


class Document(NamedTuple):
    """A file that is kept."""

    package: str
    file: str
    text: str


def head_of(text: str) -> str:
    """The comments and the docstring at the top, where a file says whose it is (the first 60 lines, at most)."""
    lines = []
    for line in text.split("\n", 60)[:60]:
        if line.startswith(("import ", "from ", "def ", "class ", "@")):
            break
        lines.append(line)
    return "\n".join(lines)


def strip_header(text: str) -> str:
    """Cut the comment blocks at the top that speak of licences, the shebang and the editor's lines: they repeat."""
    lines = text.lstrip("\ufeff\n").split("\n")
    kept: list[str] = []
    place = 0
    while place < len(lines) and (lines[place].startswith("#") or not lines[place].strip()):
        end = place
        while end < len(lines) and lines[end].startswith("#"):
            end += 1
        block = [line for line in lines[place:end] if not CODING.search(line)]
        if block and not LICENCE_WORDS.search("\n".join(block)):
            kept += [*block, ""]
        place = max(end, place + 1)
    return "\n".join(kept + lines[place:]).lstrip("\n").rstrip() + "\n"


def share_of_literals(lines: list[str]) -> float:
    """The share of lines that hold nothing but strings, numbers and brackets."""
    full = [line for line in lines if len(line.strip()) > 3]
    return sum(1 for line in full if LITERAL_REST.fullmatch(STRING.sub("", line))) / max(len(full), 1)


def outside_strings(text: str, lines: list[str]) -> list[str]:
    """The lines less those within triple-quoted strings (roughly: quotes are counted), so that prose is no table."""
    if '"""' not in text and "'''" not in text:
        return lines
    kept, inside = [], False
    for line in lines:
        quotes = line.count('"""') + line.count("'''")
        if not inside and not quotes:
            kept.append(line)
        inside ^= bool(quotes % 2)
    return kept


def thinned_test(file: str) -> bool:
    """Whether a file is one of the tests that go, chosen by a hash of its path."""
    return bool(TEST_PATH.search(file)) and zlib.crc32(file.encode()) % TESTS_KEPT != 0


def reason_against(text: str) -> str | None:
    """Why a file is left out on its own account, or None."""
    data = text.encode()
    if len(data) > SQUEEZED_FROM and len(zlib.compress(data)) < SQUEEZED * len(data):
        return "repeats itself"
    head = head_of(text)
    if foreign_source(text, head):
        return "another licence"
    if GENERATED.search(text[:1500]):
        return "generated"
    lines = text.split("\n")
    long_lines = sum(len(line) > LONG_LINE for line in lines)
    if long_lines > 0.01 * len(lines) or any(len(line) > LONGEST_LINE for line in lines):
        return "long lines"
    if len(text) > 75 * len(lines):
        return "mean line"
    if sum(map(text.count, "0123456789")) > 0.12 * len(text):
        return "digits"
    if sum(not c.isascii() for c in text) > 0.05 * len(text) if not text.isascii() else False:
        return "not ASCII"
    if share_of_literals(outside_strings(text, lines)) > 0.4:
        return "table of literals"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "does not parse"
    return None


def windows(text: str) -> list[int]:
    """Hashes of the sampled windows of ten lines, indentation, blank and bracket-only lines left out of account."""
    lines = [zlib.crc32(line.encode()) for raw in text.split("\n") if len(line := raw.strip()) > 2]
    spans = (hash(tuple(lines[i : i + WINDOW])) for i in range(max(len(lines) - WINDOW + 1, 1)))
    return [span for span in spans if span % SAMPLE == 0]


class Copies:
    """Remembers what was seen, and tells copies."""

    def __init__(self) -> None:
        self.whole: set[bytes] = set()
        self.held_out: set[int] = set()
        self.train: set[int] = set()

    def reason_against(self, text: str, held_out: bool) -> str | None:
        """Why a file is left out as a copy, or None; a file that is kept is remembered."""
        key = hashlib.blake2b("".join(text.split()).encode(), digest_size=12).digest()
        if key in self.whole:
            return "exact copy"
        found = windows(text)
        if not held_out and found and sum(w in self.held_out for w in found) > HELD_OUT_SHARE * len(found):
            return "repeats a held-out file"
        # One by one, so that a file that repeats itself counts as a copy of itself too.
        memory = self.held_out if held_out else self.train
        seen = 0
        for window in found:
            seen += window in memory
            memory.add(window)
        if seen > MOST * len(found):
            return "near copy"
        self.whole.add(key)
        return None


def read_source(path: Path) -> str | None:
    """The file's text with ``\\n`` line ends and without trailing blanks, or None if it is not UTF-8."""
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return None
    return re.sub(r"[ \t\f]+\n", "\n", text.replace("\r\n", "\n").replace("\r", "\n"))


def clean(rows: list[Row], source: Path, dropped: Counter[str]) -> Iterator[tuple[Row, Document]]:
    """Every document that is kept, held-out packages first; what is dropped is counted by reason."""
    copies = Copies()
    for row in sorted(rows, key=lambda row: (row.role != "heldout", row.name)):
        folder = source / row.name
        for path in sorted(folder.rglob("*.py")):
            size = path.stat().st_size
            if thinned_test(path.relative_to(folder).as_posix()):
                dropped["test, thinned"] += size
                continue
            text = read_source(path) if MIN_BYTES <= size <= MAX_BYTES else ""
            if not text:
                dropped["not UTF-8" if text is None else "size"] += size
                continue
            reason = reason_against(text)
            if reason is None:
                text = strip_header(text)
                short = len(text) < MIN_BYTES
                reason = "size" if short else copies.reason_against(text, row.role == "heldout")
            if reason is not None:
                dropped[reason] += size
                continue
            yield row, Document(row.name, path.relative_to(folder).as_posix(), text)


def main() -> None:
    """Clean everything that was fetched and record in the table what each package gave."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=BUILD, help="where fetch_corpus.py worked")
    args = parser.parse_args()
    rows = read_table()
    (args.build / "clean").mkdir(parents=True, exist_ok=True)
    files: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    dropped: Counter[str] = Counter()
    outputs = {r: (args.build / "clean" / f"{r}.jsonl").open("w", encoding="utf-8") for r in ("train", "heldout")}
    for row, document in clean(rows, args.build / "source", dropped):
        outputs[row.role].write(json.dumps(document._asdict(), ensure_ascii=False) + "\n")
        files[row.name] += 1
        sizes[row.name] += len(document.text.encode())
    for output in outputs.values():
        output.close()
    write_table(row._replace(files=files[row.name], bytes=sizes[row.name]) for row in rows)
    for role in outputs:
        names = [row.name for row in rows if row.role == role]
        print(f"{role}: {sum(files[n] for n in names):,} files, {sum(sizes[n] for n in names) / 1e6:.1f} MB")
    for reason, size in dropped.most_common():
        print(f"  dropped, {reason}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
