"""Write the quickstart's chat prompts.

The prompts are composed from authored templates and topics in ``quickstart_material.json``, all written for this
project; nothing is taken from a data set. There is no random state: the same material always gives the same rows.
A topic is held out as a whole, so that no held-out prompt shares its subject with a training prompt, while both
splits hold the same kinds of task. Rows are ordered by a hash of their text, so that any prefix of a file is a mixture.
"""

import argparse
import gzip
import hashlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
MATERIAL = Path(__file__).resolve().with_name("quickstart_material.json")
DATA = ROOT / "src" / "slipstream" / "pairs" / "smollm2"

MIN_WORDS, MAX_WORDS = 5, 120
SYSTEM_EVERY = 7  # one prompt in seven carries a system message
HELDOUT_PER_TOPIC = 2


class Prompt(NamedTuple):
    """One prompt with the task kind and the topic it was composed from."""

    kind: str
    topic: str
    system: str | None
    user: str

    def row(self) -> dict[str, list[dict[str, str]]]:
        """The prompt as a row of the output file."""
        messages = [{"role": "user", "content": self.user}]
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": self.system})
        return {"messages": messages}


def load_material(path: Path = MATERIAL) -> dict[str, Any]:
    """Read the authored topics, passages and templates."""
    material: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return material


def topics_of(material: dict[str, Any], kind: str, split: str) -> list[list[str]]:
    """The topics of a kind, one list of slot values each; a passage with three questions is three entries."""
    spec = material["kinds"][kind]
    if spec.get("from") != "passages":
        return list(spec[split])
    passages = material["passages"][split]
    if "question" in spec["slots"]:
        return [[title, text, question] for title, text, questions in passages for question in questions]
    return [[title, text] for title, text, _ in passages]


def fill(template: str, slots: list[str], values: list[str]) -> str:
    """Put slot values into a template; a capitalized slot name gives the value with a capital first letter."""
    mapping = dict(zip(slots, values, strict=True))
    mapping.update({name.capitalize(): value[0].upper() + value[1:] for name, value in mapping.items()})
    return template.format_map(mapping)


def compose(material: dict[str, Any], kind: str, split: str) -> Iterator[Prompt]:
    """Compose the prompts of one kind: the templates are taken in turn, a few for each topic."""
    spec = material["kinds"][kind]
    templates, systems = spec["templates"], material["systems"] + spec["systems"]
    count = spec["per_topic"] if split == "train" else min(spec["per_topic"], HELDOUT_PER_TOPIC)
    offset = list(material["kinds"]).index(kind)  # so that kinds with few prompts differ in their system messages
    number = 0
    for values in topics_of(material, kind, split):
        for _ in range(count):
            user = fill(templates[number % len(templates)], spec["slots"], values)
            turn, place = divmod(number, SYSTEM_EVERY)
            system = systems[(turn + offset) % len(systems)] if place == SYSTEM_EVERY - 1 else None
            yield Prompt(kind, values[0], system, user)
            number += 1


def build(material: dict[str, Any], split: str) -> list[Prompt]:
    """All prompts of a split, checked for length and for duplicates, in the order in which they are written."""
    prompts = [prompt for kind in material["kinds"] for prompt in compose(material, kind, split)]
    for prompt in prompts:
        words = len(f"{prompt.system or ''} {prompt.user}".split())
        assert len(prompt.user.split()) >= MIN_WORDS, f"too short: {prompt.user!r}"
        assert words <= MAX_WORDS, f"too long ({words} words): {prompt.user!r}"
    assert_distinct(prompts)
    return sorted(prompts, key=lambda prompt: hashlib.sha256(prompt.user.encode()).hexdigest())


def assert_distinct(prompts: list[Prompt]) -> None:
    """Fail if two user turns are the same, apart from case and spacing."""
    seen: set[str] = set()
    for prompt in prompts:
        text = " ".join(prompt.user.casefold().split())
        assert text not in seen, f"duplicate: {prompt.user!r}"
        seen.add(text)


def encode(prompts: list[Prompt]) -> bytes:
    """The prompts as gzip JSONL, without a time stamp or a file name in the header."""
    text = "".join(json.dumps(prompt.row(), ensure_ascii=False) + "\n" for prompt in prompts)
    buffer = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", compresslevel=9, fileobj=buffer, mtime=0) as stream:
        stream.write(text.encode())
    return buffer.getvalue()


def main(argv: list[str] | None = None) -> None:
    """Write both files and print how many prompts each holds."""
    parser = argparse.ArgumentParser(description="Write the quickstart's training and held-out prompts.")
    parser.add_argument("--train", type=Path, default=DATA / "prompts_train.jsonl.gz", help="training prompts")
    parser.add_argument("--heldout", type=Path, default=DATA / "prompts_heldout.jsonl.gz", help="held-out prompts")
    args = parser.parse_args(argv)
    material = load_material()
    splits = {"train": build(material, "train"), "heldout": build(material, "heldout")}
    assert_distinct(splits["train"] + splits["heldout"])
    for split, prompts in splits.items():
        path: Path = getattr(args, split)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode(prompts))
        systems = sum(prompt.system is not None for prompt in prompts)
        topics = len({(prompt.kind, prompt.topic) for prompt in prompts})
        print(f"{split}: {len(prompts)} prompts, {topics} topics, {systems} with a system message -> {path}")


if __name__ == "__main__":
    main()
