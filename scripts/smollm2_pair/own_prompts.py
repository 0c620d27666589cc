"""Prompts of our own material: what was written for the quickstart and, beside this file, a good deal more.

A kind has templates and topics; each topic is put into a few of the templates, in turn. Problems have numbers and names
drawn by a hash of what they are drawn for. A topic is held out as a whole, the quickstart's held-out topics among them.
"""

import hashlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))

import quickstart_prompts  # noqa: E402
from quickstart_prompts import fill, load_material, topics_of  # noqa: E402

FILES = ("everyday", "writing", "knowledge", "code", "passages")
HELDOUT_PER_TOPIC = 1
SLOT = re.compile(r"(\w+)=(\S+)")


class Prompt(NamedTuple):
    """A prompt. ``core`` is what near-duplicates are judged by, ``topic`` what is held out or not."""

    kind: str
    source: str
    topic: str
    user: str
    core: str
    system: str | None = None
    follow: tuple[str, ...] = ()
    before: tuple[str, str] | None = None  # an authored turn and its answer, in held-out conversations
    function: str = ""

    def key(self) -> str:
        """What orders prompts, and decides by chance that is the same everywhere."""
        return hashlib.sha256("\0".join((*self.turns(), *(self.before or ()))).encode()).hexdigest()

    def turns(self) -> list[str]:
        """The user's turns."""
        return [self.user, *self.follow]


def draw(count: int, *parts: object) -> int:
    """A number below ``count``, by a hash of the parts."""
    text = "\0".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") % count


def load(name: str) -> dict[str, Any]:
    """A material file of this folder."""
    found: dict[str, Any] = json.loads((HERE / f"material_{name}.json").read_text(encoding="utf-8"))
    return found


def merged() -> dict[str, Any]:
    """The quickstart's material with this folder's added to it: topics, templates, passages, kinds."""
    material = load_material()
    for name in FILES:
        extra = load(name)
        for split, passages in extra.get("passages", {}).items():
            material["passages"][split] += passages
        for kind, spec in extra["kinds"].items():
            into = material["kinds"].setdefault(kind, {"slots": spec.get("slots"), "systems": [], "templates": []})
            into["per_topic"] = spec["per_topic"]
            for key in ("systems", "templates"):
                into[key] = [*into[key], *spec.get(key, [])]
            for split in ("train", "heldout"):
                if split in spec:
                    into[split] = [*into.get(split, []), *(topic.split("|") for topic in spec[split])]
    stated = set(load("code")["states_a_humaneval_task"])
    code = material["kinds"]["code"]
    for split in ("train", "heldout"):
        code[split] = [topic for topic in code[split] if topic[0] not in stated]
    return material


def composed(material: dict[str, Any], split: str) -> Iterator[Prompt]:
    """The prompts of templates and topics."""
    for kind, spec in material["kinds"].items():
        count = min(spec["per_topic"], len(spec["templates"])) if split == "train" else HELDOUT_PER_TOPIC
        number = draw(len(spec["templates"]), kind, split)
        for values in topics_of(material, kind, split):
            assert len(values) == len(spec["slots"]), f"{kind}: {values}"
            for _ in range(count):
                template = spec["templates"][number % len(spec["templates"])]
                user = fill(template, spec["slots"], values)
                number += 1
                core = user
                if spec.get("from") == "passages":  # a passage may be asked about in several ways
                    core = fill(template, spec["slots"], [values[0], values[0], *values[2:]])
                function = values[1].split("(")[0] if kind == "code" else ""
                yield Prompt(f"own/{kind}", "own", values[0], user, core, function=function)


def drawn(pools: dict[str, list[str]], ranges: str, number: int) -> dict[str, str | int]:
    """Values for a problem: one of each pool, and numbers of ranges such as ``3-9`` or products such as ``a*b+c``."""
    seed = (ranges, number)
    values: dict[str, Any] = {name: pool[draw(len(pool), name, *seed)] for name, pool in pools.items()}
    for name, text in SLOT.findall(ranges):
        if bounds := re.fullmatch(r"(-?\d+)-(-?\d+)", text):
            low, high = map(int, bounds.groups())
            values[name] = low + draw(high - low + 1, name, *seed)
        else:
            values[name] = evaluate(text, values)
    return values


def evaluate(text: str, values: dict[str, Any]) -> int:
    """The value of a sum of products of names and numbers."""
    total = 0
    for sign, term in re.findall(r"([+-]?)([^+-]+)", text):
        product = -1 if sign == "-" else 1
        for factor in term.split("*"):
            product *= int(factor) if factor.isdigit() else values[factor]
        total += product
    return total


def problems(split: str) -> Iterator[Prompt]:
    """Arithmetic, logic, extraction and formatting, each problem with several draws of its values."""
    material = load("problems")
    for kind, spec in material["kinds"].items():
        asks = spec.get("asks", ["{message}"])
        for place, (text, ranges) in enumerate(spec[split]):
            for number in range(spec["variants"] if split == "train" else 2):
                values = drawn(material["pools"], f"{ranges} {text}"[: len(ranges)], place * 1000 + number)
                message = text.format_map(values)
                ask = asks[(place * 5 + number) % len(asks)]
                ending = spec["endings"][draw(len(spec["endings"]), message)]
                user = ask.format(message=message) + ending
                yield Prompt(f"own/{kind}", "own", text, user, user)


def conversations() -> Iterator[Prompt]:
    """The held-out conversations, whose first answers are authored."""
    for (first, answer), then in load("passages")["conversations_heldout"]:
        yield Prompt("own/conversation", "own", first, then, f"{first} {then}", before=(first, answer))


def own(split: str) -> Iterator[Prompt]:
    """All prompts of a split from our own material, with system messages where they belong; no duplicates removed."""
    material = merged()
    systems = {kind: material["systems"] + spec["systems"] for kind, spec in material["kinds"].items()}
    systems |= {kind: spec["systems"] for kind, spec in load("problems")["kinds"].items()}
    for prompt in (*composed(material, split), *problems(split)):
        yield prompt._replace(system=system_for(prompt, systems[prompt.kind.removeprefix("own/")]))
    if split == "heldout":
        yield from conversations()


def system_for(prompt: Prompt, systems: list[str], one_in: int = 8) -> str | None:
    """A system message for one prompt in so many."""
    return systems[draw(len(systems), "which", prompt.user)] if systems and not draw(one_in, "s", prompt.user) else None


def with_followup(prompt: Prompt, material: dict[str, Any], one_in: int) -> Prompt:
    """The prompt with one or two further turns of the user, for one prompt in so many."""
    kind = prompt.kind.split("/")[1]
    group = next((g for g, kinds in material["followup_of"].items() if kind in kinds), None)
    if prompt.kind.startswith("code/") and kind in ("complete", "write"):
        group = "code"
    elif prompt.kind.startswith("text/"):
        group = "any"
    if group is None or draw(one_in, "follow", prompt.user):
        return prompt
    own_lines, any_lines = material["followups"][group], material["followups"]["any"]
    lines = own_lines if group == "code" or draw(3, "group", prompt.user) else any_lines
    first = draw(len(lines), "first", prompt.user)
    follow = (lines[first],)
    if not draw(4, "second", prompt.user):
        follow += (lines[(first + 1 + draw(len(lines) - 1, "next", prompt.user)) % len(lines)],)
    return prompt._replace(follow=follow)


def quickstart_heldout() -> list[str]:
    """The quickstart's held-out prompts, which stay held out."""
    return [prompt.user for prompt in quickstart_prompts.build(load_material(), "heldout")]


def names_of_heldout() -> re.Pattern[str]:
    """A pattern that finds a held-out topic by its name; both sides of a held-out comparison are such names."""
    names: set[str] = set()
    for material in (merged(), load_material()):
        for kind, spec in material["kinds"].items():
            if spec.get("from") != "passages":
                for values in spec["heldout"]:
                    names.update(value.casefold() for value in values[: 2 if kind == "compare" else 1])
    ordered = sorted(names, key=lambda name: (-len(name), name))
    return re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, ordered))})(?!\w)")
