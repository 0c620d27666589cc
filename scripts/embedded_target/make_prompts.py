"""Make completion prompts from the cleaned source: a signature with its docstring, and what stands before it.

A prompt ends at the docstring's closing quotes, never in a line end: a line end and the indent after it are one token,
which a model that is to go on must choose itself. Every prompt is exactly one of a few lengths in tokens, so that they
can be generated in batches without padding. What stands before the function is cut at the start of a line: of the many
functions, those are taken that have a line start at the right distance.
"""

import argparse
import ast
import hashlib
import json
import os
import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer

BUILD = Path(__file__).resolve().parents[2] / "build" / "embedded_target"
LENGTHS = (64, 80, 96, 128, 160)
MIN_DOCSTRING, MIN_BODY_LINES = 20, 3  # characters, lines
FILES_PER_PACKAGE = 300  # looked at, of those drawn at random
PER_FILE = 8
QUOTES = ('"""', "'''")


class Prompt(NamedTuple):
    """A prompt and where it is from."""

    prompt: str
    package: str
    file: str
    tokens: int


class Place(NamedTuple):
    """A documented function: where its first line starts and where its docstring ends, in characters, and its key."""

    start: int
    end: int
    key: str


def line_starts(text: str) -> list[int]:
    """Where each line starts, in characters."""
    starts = [0]
    for line in text.split("\n"):
        starts.append(starts[-1] + len(line) + 1)
    return starts


def worth_completing(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function has a body to speak of behind its docstring."""
    rest = node.body[1:]
    if not rest or isinstance(rest[0], ast.Raise | ast.Pass) or node.name.startswith("test"):
        return False
    if isinstance(rest[0], ast.Expr) and isinstance(rest[0].value, ast.Constant):
        return False
    return (rest[-1].end_lineno or 0) - rest[0].lineno + 1 >= MIN_BODY_LINES


def documented(text: str) -> Iterator[Place]:
    """The documented functions of a file whose docstring ends its line."""
    starts = line_starts(text)
    lines = text.split("\n")
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or not worth_completing(node):
            continue
        docstring = ast.get_docstring(node)
        last = node.body[0].end_lineno
        if docstring is None or last is None or len(docstring) < MIN_DOCSTRING:
            continue
        line = lines[last - 1]
        if not line.endswith(QUOTES):
            continue
        first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
        key = hashlib.sha256(" ".join([node.name, *docstring.split()]).encode()).hexdigest()
        yield Place(starts[first - 1], starts[last - 1] + len(line), key)


def fits(text: str, cut: int, place: Place) -> bool:
    """Whether the prompt may start at `cut`: at a line of the module's level, or at a line end.

    So the prompt's tokens are those that the file has there. It may start within another function, as a window of
    training text does.
    """
    if cut > place.start or cut >= len(text):
        return False
    if cut == 0 or text[cut - 1] == "\n":
        return not text[cut].isspace()
    return text[cut] == "\n"


def prompts_of(
    tokenizer: Tokenizer, document: dict[str, str], lengths: tuple[int, ...]
) -> Iterator[tuple[str, Prompt]]:
    """Every prompt that a file gives, at most one for a function, with its function's key."""
    text = document["text"]
    places = list(documented(text))
    if not places:
        return
    offsets = tokenizer.encode(text).offsets
    token_at_end = {end: number + 1 for number, (_, end) in enumerate(offsets)}
    for place in places:
        end = token_at_end.get(place.end)
        for length in lengths:
            if end is None or end < length:
                continue
            cut = offsets[end - length][0]
            prompt = text[cut : place.end]
            if any(prompt.count(quotes) % 2 for quotes in QUOTES):
                continue  # it starts within a docstring, whose end would read as a beginning
            if fits(text, cut, place) and len(tokenizer.encode(prompt).ids) == length:
                yield place.key, Prompt(prompt, document["package"], document["file"], length)
                break


def draw(path: Path, seed: int) -> list[dict[str, str]]:
    """Files of every package, drawn at random, packages in turn."""
    chance = random.Random(seed)
    packages: dict[str, list[dict[str, str]]] = defaultdict(list)
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            document = json.loads(line)
            if '"""' in document["text"]:
                packages[document["package"]].append(document)
    for name, documents in packages.items():
        chance.shuffle(documents)
        packages[name] = documents[:FILES_PER_PACKAGE]
    turns = range(max(map(len, packages.values()), default=0))
    return [documents[turn] for turn in turns for _, documents in sorted(packages.items()) if turn < len(documents)]


def choose(tokenizer: Tokenizer, drawn: list[dict[str, str]], count: int, cap: int, seen: set[str]) -> list[Prompt]:
    """Take prompts until there are enough: so many of a length, of a package, of a file, and no function twice."""
    room = {length: -(-count * 5 // (4 * len(LENGTHS))) for length in LENGTHS}  # a quarter over an equal share
    per_package: Counter[str] = Counter()
    chosen: list[Prompt] = []
    for document in drawn:
        if len(chosen) >= count:
            break
        if per_package[document["package"]] >= cap:
            continue
        # The rarest length first, so that all of them fill up.
        lengths = tuple(sorted((n for n in LENGTHS if room[n] > 0), key=lambda n: -room[n]))
        taken = 0
        for key, prompt in prompts_of(tokenizer, document, lengths):
            if key in seen or taken == PER_FILE or room[prompt.tokens] == 0 or len(chosen) >= count:
                continue
            seen.add(key)
            chosen.append(prompt)
            room[prompt.tokens] -= 1
            per_package[prompt.package] += 1
            taken += 1
    return chosen


def main() -> None:
    """Make the held-out prompts, then the training prompts, none of which repeats a held-out one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=BUILD, help="where the other steps worked")
    parser.add_argument("--train", type=int, default=3000)
    parser.add_argument("--heldout", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    tokenizer = Tokenizer.from_file(str(args.build / "tokenizer" / "tokenizer.json"))
    seen: set[str] = set()
    for role, count, cap in (("heldout", args.heldout, 120), ("train", args.train, 15)):
        drawn = draw(args.build / "clean" / f"{role}.jsonl", args.seed)
        chosen = choose(tokenizer, drawn, count, cap, seen)
        with (args.build / f"prompts_{role}.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(prompt._asdict(), ensure_ascii=False) + "\n" for prompt in chosen)
        lengths = Counter(prompt.tokens for prompt in chosen)
        packages = len({prompt.package for prompt in chosen})
        print(f"{role}: {len(chosen)} prompts of {packages} packages, by length {dict(sorted(lengths.items()))}")


if __name__ == "__main__":
    main()
