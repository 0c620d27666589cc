"""Own prompts are split, answered once, and become the data of the recipe."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from slipstream.data.conversations import read_conversations
from slipstream.errors import ConfigError, DataError
from slipstream.quickstart.prompts import split, use_own_prompts
from slipstream.records import Conversation
from support.tiny_run import make_inputs, tiny_recipe


def write_prompts(path: Path, count: int) -> Path:
    rows = [{"prompt": f"question number {i}"} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_every_tenth_is_held_out_and_never_more_than_sixty() -> None:
    training, heldout = split([Conversation(origin=str(i)) for i in range(1000)])
    assert [c.origin for c in heldout[:3]] == ["9", "19", "29"]
    assert (len(training), len(heldout)) == (940, 60)
    assert not {c.origin for c in training} & {c.origin for c in heldout}


def test_they_are_answered_once_and_become_the_data(tmp_path: Path) -> None:
    root = make_inputs(tmp_path)
    recipe = tiny_recipe(root, tmp_path / "run", regenerate__max_new_tokens=5)
    prompts = write_prompts(tmp_path / "mine.jsonl", 24)
    found = use_own_prompts(recipe, prompts, Console(file=io.StringIO()))
    answered = list(read_conversations(found.data.train))
    assert len(answered) == 22
    assert all(c.messages[-1].role == "assistant" for c in answered)
    held = [c.messages[-1].content for c in read_conversations(found.data.heldout)]
    assert held == ["question number 9", "question number 19"]
    assert not (tmp_path / "run").exists()  # the run directory is made by training
    before = Path(found.data.train[0]).stat().st_mtime_ns
    assert use_own_prompts(recipe, prompts, Console(file=io.StringIO())) == found
    assert Path(found.data.train[0]).stat().st_mtime_ns == before
    other = use_own_prompts(recipe, write_prompts(tmp_path / "other.jsonl", 30), Console(file=io.StringIO()))
    assert other.data.train != found.data.train


def test_too_few_and_none_are_refused(tmp_path: Path) -> None:
    recipe = tiny_recipe(make_inputs(tmp_path), tmp_path / "run")
    console = Console(file=io.StringIO())
    with pytest.raises(DataError, match="holds 19 prompts; give 20 or more"):
        use_own_prompts(recipe, write_prompts(tmp_path / "few.jsonl", 19), console)
    with pytest.raises(DataError, match="gone"):
        use_own_prompts(recipe, tmp_path / "gone.jsonl", console)
    (tmp_path / "file").write_text("", encoding="utf-8")
    blocked = replace(recipe, run=replace(recipe.run, directory=str(tmp_path / "file" / "run")))
    with pytest.raises(ConfigError, match=r"cannot be written: .*; choose another --run\.directory"):
        use_own_prompts(blocked, write_prompts(tmp_path / "some.jsonl", 20), console)
