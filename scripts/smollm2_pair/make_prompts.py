"""Make the chat prompts of SmolLM2-135M-Instruct's drafter: about 40,000 to train on, some hundred held out.

    own   35 %  our own material (material_*.json here, and the quickstart's)
    code  35 %  functions of the audited packages
    text  30 %  their documentation

Reads what ``scripts/embedded_target`` left in build/embedded_target, and the HumanEval wheel, so that nothing near it
is trained on. There is no random state. Held-out prompts are of other topics and other packages. An answer within a
conversation is a placeholder, PLACEHOLDER: ``slipstream prepare --regenerate`` lets the target answer every turn; only
the held-out conversations have authored ones.

    prompts_train.jsonl, prompts_heldout.jsonl   {"messages", "kind", "source"}
    manifest.json                                counts, refusals, sources with licence and digest, SHA-256
    packed/prompts_train.jsonl.xz                to travel
"""

import argparse
import hashlib
import json
import lzma
import os
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import function_prompts
import text_prompts
from audit_packages import Row, read_table
from humaneval_prompts import BUILD, ROOT, fetch, read
from near_duplicates import Phrases, Seen
from own_prompts import Prompt, load, names_of_heldout, own, quickstart_heldout, with_followup

CORPUS = ROOT / "build" / "embedded_target"
TRAIN = {"own": 14_000, "code": 14_000, "text": 12_000}
HELDOUT = {"own": 1_000, "code": 220, "text": 180}  # all of our own
PER_PACKAGE = {"train": 90, "heldout": 40}
MOST_TOKENS = 300  # of a prompt's messages, the template's own left out
FOLLOWED = {"own": 8, "code": 25, "text": 25}  # one conversation in so many goes on
PLACEHOLDER = "(the target answers here)"
FROM_HELDOUT = 0.3  # of long texts' n-grams: stricter towards held-out prompts than among training prompts

Count = Callable[[list[str]], list[int]]


class HumanEval:
    """Tells prompts that are near a HumanEval problem: by the name of the function, by eight words in a row."""

    def __init__(self, problems: Iterable[dict[str, Any]]) -> None:
        problems = list(problems)
        self.names = {self.plain(problem["entry_point"]) for problem in problems}
        self.phrases = Phrases(problem["prompt"] for problem in problems)

    @staticmethod
    def plain(name: str) -> str:
        """A function's name without case and underscores."""
        return name.replace("_", "").casefold()

    def reason(self, prompt: Prompt) -> str | None:
        """Why the prompt is too near, or None."""
        if prompt.function and self.plain(prompt.function) in self.names:
            return "function named as in HumanEval"
        return "words of HumanEval" if any(map(self.phrases.met, (*prompt.turns(), prompt.core))) else None


class Sieve:
    """Refuses what is too long, too near something taken, held out or HumanEval, or one too many of a package."""

    def __init__(self, humaneval: HumanEval, count: Count, heldout: Iterable[str] = ()) -> None:
        self.humaneval, self.count = humaneval, count
        self.seen, self.away = Seen(), Seen(most_long=FROM_HELDOUT)
        self.refused: dict[str, Counter[str]] = {part: Counter() for part in TRAIN}
        for text in heldout:
            self.away.add(text)

    def reason(self, prompt: Prompt, tokens: int) -> str | None:
        """Why a prompt is refused, or None; what is not refused is remembered."""
        if tokens > MOST_TOKENS:
            return "too long"
        if found := self.humaneval.reason(prompt):
            return found
        if self.away.near(prompt.core):
            return "near a held-out prompt"
        return None if self.seen.take(prompt.core) else "near-duplicate"

    def take(self, prompts: list[Prompt], most: int, per_package: int) -> list[Prompt]:
        """The first so many prompts that are not refused."""
        kept: list[Prompt] = []
        packages: Counter[str] = Counter()
        for prompt, tokens in zip(prompts, self.count([text_of(p) for p in prompts]), strict=True):
            part = prompt.kind.split("/")[0]
            if len(kept) == most:
                self.refused[part]["enough"] += 1
            elif part != "own" and packages[prompt.source] >= per_package:
                self.refused[part]["package's share"] += 1
            elif reason := self.reason(prompt, tokens):
                self.refused[part][reason] += 1
            else:
                packages[prompt.source] += 1
                kept.append(prompt)
        return kept


def messages_of(prompt: Prompt) -> list[dict[str, str]]:
    """The conversation up to the turn that is to be answered last."""
    messages = [] if prompt.system is None else [{"role": "system", "content": prompt.system}]
    for user, answer in [prompt.before] if prompt.before else []:
        messages += [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]
    for turn in prompt.turns():
        messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": PLACEHOLDER}]
    return messages[:-1]


def row_of(prompt: Prompt) -> dict[str, Any]:
    """The prompt as a row."""
    return {"messages": messages_of(prompt), "kind": prompt.kind, "source": prompt.source}


def text_of(prompt: Prompt) -> str:
    """All that is said before the answer."""
    return "\n".join(message["content"] for message in messages_of(prompt))


def counter() -> Count:
    """Counts the target's tokens."""
    from slipstream.config import TargetConfig
    from slipstream.target.description import describe_target

    _, tokenizer, _ = describe_target(TargetConfig(path="smollm2"))
    return lambda texts: [len(ids) for ids in tokenizer(texts)["input_ids"]] if texts else []


def build(corpus: Path, folders: list[Path], humaneval: HumanEval, count: Count) -> tuple[dict[str, list[Prompt]], Any]:
    """Both splits, in the order in which they are written, and what was refused."""
    follow = load("passages")
    names = names_of_heldout()
    splits: dict[str, list[Prompt]] = {}
    refused: dict[str, Any] = {}
    for split, wanted in (("heldout", HELDOUT), ("train", TRAIN)):
        heldout = [*(prompt.core for prompt in splits["heldout"]), *quickstart_heldout()] if splits else []
        sieve = Sieve(humaneval, count, heldout)
        functions = corpus / ("functions_heldout.jsonl" if split == "heldout" else "functions.jsonl")
        ours = sorted(own(split), key=Prompt.key)
        if split == "train":
            kept = [prompt for prompt in ours if not names.search(prompt.user.casefold())]
            sieve.refused["own"]["names a held-out topic"] = len(ours) - len(kept)
            ours = [with_followup(prompt, follow, FOLLOWED["own"]) for prompt in kept]
        parts = {
            "own": ours,
            "code": list(function_prompts.candidates(functions)),
            "text": text_prompts.candidates(corpus, split, folders),
        }
        if split == "train":
            for part in ("code", "text"):
                parts[part] = [with_followup(prompt, follow, FOLLOWED[part]) for prompt in parts[part]]
        chosen = [p for part in parts for p in sieve.take(parts[part], wanted[part], PER_PACKAGE[split])]
        splits[split] = sorted(chosen, key=Prompt.key)
        refused[split] = {part: dict(sorted(counts.items())) for part, counts in sieve.refused.items()}
    return splits, refused


def encode(prompts: list[Prompt]) -> bytes:
    """The prompts as JSON lines."""
    return "".join(json.dumps(row_of(prompt), ensure_ascii=False) + "\n" for prompt in prompts).encode()


def described(prompts: list[Prompt], data: bytes, count: Count, table: dict[str, Row]) -> dict[str, Any]:
    """What there is to know of a split."""
    tokens = sorted(count([text_of(prompt) for prompt in prompts]))
    kinds = Counter(prompt.kind for prompt in prompts)
    sources = Counter(prompt.source for prompt in prompts)
    return {
        "prompts": len(prompts),
        "parts": dict(sorted(Counter(prompt.kind.split("/")[0] for prompt in prompts).items())),
        "kinds": dict(sorted(kinds.items())),
        "with_system": sum(prompt.system is not None for prompt in prompts),
        "turns": {str(n): c for n, c in sorted(Counter(len(p.turns()) + bool(p.before) for p in prompts).items())},
        "tokens_by_tenths": [tokens[(len(tokens) - 1) * tenth // 10] for tenth in range(11)],
        "bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
        "sources": {
            name: {"prompts": number, "licence": "Apache-2.0", "from": "authored for this project"}
            if name == "own"
            else {"prompts": number} | {key: getattr(table[name], key) for key in ("version", "licence", "sha256")}
            for name, number in sorted(sources.items())
        },
    }


def write(splits: dict[str, list[Prompt]], refused: Any, folder: Path, count: Count) -> dict[str, Any]:
    """Write prompts, manifest and the packed file; return the manifest. Every source must be in the audited table."""
    table = {row.name: row for row in read_table()}
    manifest: dict[str, Any] = {"most_tokens": MOST_TOKENS, "per_package": PER_PACKAGE, "refused": refused}
    (folder / "packed").mkdir(parents=True, exist_ok=True)
    for split, prompts in splits.items():
        for prompt in prompts:
            if prompt.source != "own" and table[prompt.source].role != split:
                raise SystemExit(f"{prompt.source} is not audited for {split}")
        data = encode(prompts)
        (folder / f"prompts_{split}.jsonl").write_bytes(data)
        manifest[split] = described(prompts, data, count, table)
        if split == "train":
            packed = lzma.compress(data, preset=9 | lzma.PRESET_EXTREME)
            (folder / "packed" / "prompts_train.jsonl.xz").write_bytes(packed)
            manifest[split]["packed_bytes"] = len(packed)
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return manifest


def main() -> None:
    """Compose, sieve, write, print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, default=CORPUS, help="where scripts/embedded_target worked")
    parser.add_argument("--output", type=Path, default=BUILD, help="where the prompts go")
    parser.add_argument("--wheels", type=Path, action="append", default=[], help="a folder of wheels; may be repeated")
    args = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    count = counter()
    splits, refused = build(args.corpus, args.wheels, HumanEval(read(fetch(args.output))), count)
    manifest = write(splits, refused, args.output, count)
    for split in splits:
        print(split, json.dumps({k: v for k, v in manifest[split].items() if k != "sources"}, indent=1))
        print(f"{len(manifest[split]['sources'])} sources; refused:", json.dumps(refused[split], indent=1))


if __name__ == "__main__":
    main()
