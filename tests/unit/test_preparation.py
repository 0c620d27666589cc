"""``prepare --regenerate``: what it tells while it answers, and what decides whether it may go on."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from slipstream.data.regenerate_report import RegenerateProgress
from slipstream.errors import DataError
from slipstream.preparation import RegenerateDisplay, prepare
from support.tiny_run import make_inputs, tiny_recipe


def shown(*steps: tuple[int, int, float, float | None]) -> list[str]:
    """Return the lines that a console that is no terminal gets for (done, tokens, rate, seconds left)."""
    console = Console(file=io.StringIO(), width=200)
    with RegenerateDisplay(console) as display:
        for done, tokens, rate, left in steps:
            display.update(
                RegenerateProgress(done=done, total=9, tokens=tokens, tokens_per_second=rate, eta_seconds=left)
            )
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def test_no_rate_is_shown_before_there_is_one():
    lines = shown((0, 0, 0.0, None), (3, 60, 12.0, 10.0))
    assert lines == ["answered 3 of 9: 12 tokens/s, about 10 s left"]
    assert shown((6, 0, 0.0, None)) == ["answered 6 of 9"]  # by an earlier process


def test_answers_of_another_dtype_or_attention_are_not_mixed(tmp_path: Path):
    make_inputs(tmp_path)
    console = Console(file=io.StringIO(), width=200)

    def regenerate(**changes: str) -> None:
        recipe = tiny_recipe(tmp_path, tmp_path / "run", regenerate__max_new_tokens=4, data__max_samples=2, **changes)
        prepare(recipe, regenerate_to=tmp_path / "out.jsonl", console=console)

    regenerate()
    regenerate()  # the same work: its report is read back
    told = json.loads((tmp_path / "out.jsonl.report.json").read_text())["identity"]
    assert {k: told[k] for k in ("target.dtype", "target.attention", "device")} == {
        "target.dtype": "float32",
        "target.attention": "sdpa",
        "device": "cpu",
    }
    with pytest.raises(DataError, match=r"target\.dtype was float32, now bfloat16"):
        regenerate(target__dtype="bfloat16")
    with pytest.raises(DataError, match=r"target\.attention was sdpa, now eager"):
        regenerate(target__attention="eager")


def test_heldout_prompts_that_are_trained_on_are_told(tmp_path: Path):
    make_inputs(tmp_path)
    for sources, told in (("train", True), ("heldout", False)):
        console = Console(file=io.StringIO(), width=400)
        prepare(tiny_recipe(tmp_path, "run", data__heldout=tmp_path / "train.jsonl"), sources=sources, console=console)
        assert ("20 of 20 held-out prompts" in console.file.getvalue()) is told  # type: ignore[attr-defined]
