"""The quickstart's prompts: enough of them, all different, no topic in both splits, the same bytes every time."""

import gzip
import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "quickstart_prompts.py"
DATA = ROOT / "src" / "slipstream" / "pairs" / "smollm2"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("quickstart_prompts", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def splits(script: ModuleType) -> dict[str, Any]:
    material = script.load_material()
    return {split: script.build(material, split) for split in ("train", "heldout")}


def test_counts_and_kinds(splits: dict[str, Any]) -> None:
    assert len(splits["train"]) >= 2000
    assert len(splits["heldout"]) >= 100
    kinds = {prompt.kind for prompt in splits["train"]}
    assert len(kinds) >= 14
    assert kinds == {prompt.kind for prompt in splits["heldout"]}


def test_no_duplicates_and_bounded_length(splits: dict[str, Any]) -> None:
    users = [" ".join(prompt.user.casefold().split()) for prompt in splits["train"] + splits["heldout"]]
    assert len(users) == len(set(users))
    assert all(5 <= len(user.split()) <= 120 for user in users)


def test_a_duplicate_is_refused(script: ModuleType) -> None:
    prompts = [
        script.Prompt("word", "x", None, "Define this word."),
        script.Prompt("word", "x", None, "define  this word."),
    ]
    with pytest.raises(AssertionError, match="duplicate"):
        script.assert_distinct(prompts)


def test_every_template_is_used_and_filled(script: ModuleType, splits: dict[str, Any]) -> None:
    for kind, spec in script.load_material()["kinds"].items():
        used = len([prompt for prompt in splits["train"] if prompt.kind == kind])
        assert used >= len(spec["templates"]), kind
    assert not any(re.search(r"\{[A-Za-z]+\}|\w [.?!]|\.\.", prompt.user) for prompt in splits["train"])


def test_heldout_topics_are_disjoint(script: ModuleType, splits: dict[str, Any]) -> None:
    training = "\n".join(prompt.user for prompt in splits["train"]).casefold()
    material = script.load_material()
    for kind, spec in material["kinds"].items():
        both = 2 if kind == "compare" else 1  # a held-out comparison keeps both of its sides out of training
        train = {value.casefold() for values in script.topics_of(material, kind, "train") for value in values[:both]}
        for values in script.topics_of(material, kind, "heldout"):
            for value in values[:both]:
                assert value.casefold() not in train
                if spec.get("from") != "passages":  # a passage's title is not part of its prompt
                    assert not re.search(rf"(?<!\w){re.escape(value.casefold())}(?!\w)", training), value
    texts = {prompt.user for prompt in splits["heldout"]}
    assert not any(passage[1] in training for passage in material["passages"]["heldout"])
    assert texts.isdisjoint(prompt.user for prompt in splits["train"])


def test_bytes_are_reproducible(script: ModuleType, tmp_path: Path) -> None:
    outputs = []
    for run in ("first", "second"):
        train, heldout = tmp_path / run / "a.gz", tmp_path / run / "b.gz"
        script.main(["--train", str(train), "--heldout", str(heldout)])
        outputs.append((train.read_bytes(), heldout.read_bytes()))
    assert outputs[0] == outputs[1]
    assert all(data[4:8] == bytes(4) for data in outputs[0])  # the header's time stamp


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_packaged_files_are_current(splits: dict[str, Any], split: str) -> None:
    with gzip.open(DATA / f"prompts_{split}.jsonl.gz", "rt", encoding="utf-8") as stream:
        rows = [json.loads(line) for line in stream]
    assert rows == [prompt.row() for prompt in splits[split]]
    roles = {tuple(message["role"] for message in row["messages"]) for row in rows}
    assert roles == {("user",), ("system", "user")}
