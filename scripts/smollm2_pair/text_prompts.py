"""Prompts about passages of the audited packages' texts: shorten, put plainly, list, name, question, mend, continue."""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts" / "embedded_target"))

from audit_packages import read_table  # noqa: E402
from fetch_corpus import present  # noqa: E402
from own_prompts import Prompt, draw, load, system_for  # noqa: E402
from passages import Passage, of_sources, of_wheels  # noqa: E402

TASKS = {"summary": 30, "plain": 20, "points": 14, "questions": 10, "title": 8, "terms": 6, "improve": 6, "continue": 6}
ORIGINS = ("description", "module", "class", "function")


def wheels_of(role: str, folders: list[Path]) -> Iterator[tuple[str, Path]]:
    """The audited wheels of a role that lie in the folders, their digests checked; what is missing is told."""
    rows = [row for row in read_table() if row.role == role]
    found = present(rows, folders)
    if len(found) < len(rows):
        told = (
            f"{role}: {len(rows) - len(found)} of {len(rows)} wheels are not here, so their descriptions are left out"
        )
        print(f"{told}, and the prompts are others; name their folder with --wheels", file=sys.stderr)
    yield from sorted(found.items())


def prompt_of(passage: Passage, phrasings: dict[str, list[str]], systems: list[str]) -> Prompt:
    """The prompt about a passage, its task and wording drawn by hash."""
    place = draw(sum(TASKS.values()), "task", passage.text)
    task = next(name for name, end in ends().items() if place < end)
    template = phrasings[task][draw(len(phrasings[task]), "template", passage.text)]
    user = template.format(text=passage.text)
    prompt = Prompt(f"text/{task}", passage.package, passage.package, user, passage.text)
    return prompt._replace(system=system_for(prompt, systems, 12))


def ends() -> dict[str, int]:
    """The running total of the tasks' shares."""
    total = 0
    return {name: (total := total + share) for name, share in TASKS.items()}


def of_passages(passages: Iterable[Passage]) -> list[Prompt]:
    """A prompt for each passage, those first that are written for anybody, otherwise as hashes order them."""
    material = load("passages")
    ordered = sorted(set(passages), key=lambda p: (ORIGINS.index(p.origin), draw(2**60, p.text), p))
    return [prompt_of(passage, material["passage_phrasings"], material["systems"]) for passage in ordered]


def candidates(build: Path, role: str, folders: list[Path]) -> list[Prompt]:
    """The prompts of the packages of a role."""
    sources = of_sources(build / "clean" / f"{role}.jsonl")
    return of_passages([*of_wheels(wheels_of(role, [build / "wheels", *folders])), *sources])
