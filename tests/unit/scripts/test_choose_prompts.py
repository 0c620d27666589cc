"""Held-out prompts are those whose answers end and do not loop; the rates are of all and of the chosen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slipstream.data.conversations import read_conversations
from support.scripts import load
from support.tiny import save_tiny_target, write_conversations

script = load("choose_prompts")
END = frozenset({1})


def test_fit_answers_end_are_not_short_and_do_not_loop() -> None:
    good = [*range(100, 130), 1]
    assert script.fit(good, END, 16)
    assert not script.fit(good[:-1], END, 16)
    assert not script.fit([*range(100, 110), 1], END, 16)
    assert not script.fit([*([5, 6] * 12), 1], END, 16)
    assert not script.fit([*([*range(200, 220)] * 3), 1], END, 16)  # a line of 20 tokens


def test_rates_count_each_period() -> None:
    found = script.rates([[*range(30), 1], [4] * 30, [*([*range(200, 220)] * 3), 1], [*range(40)]], END)
    assert found == {"answers": 4, "ended": 0.5, "median_tokens": 40, "loops_8": 0.25, "loops_24": 0.5}
    assert script.rates([], END)["answers"] == 0


def test_the_whole_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    save_tiny_target(tmp_path / "target", "qwen3_5")
    prompts, out = write_conversations(tmp_path / "prompts.jsonl", 5), tmp_path / "chosen.jsonl"
    arguments = ["--target", tmp_path / "target", "--prompts", prompts, "--out", out, "--count", 2, "--device", "cpu"]
    monkeypatch.setattr("sys.argv", ["choose_prompts", *map(str, arguments), "--max-new-tokens", "20"])
    monkeypatch.setattr(script, "fit", lambda answer, ends, shortest: len(answer) > 1)
    script.main()
    chosen = list(read_conversations([str(out)]))
    assert [c.messages[0].content for c in chosen] == [f"Question {i}.0: what is {i} plus 0?" for i in range(2)]
    report = json.loads(Path(f"{out}.report.json").read_text(encoding="utf-8"))
    assert (report["all"]["answers"], report["chosen"]["answers"]) == (5, 2)
    monkeypatch.setattr(script, "fit", lambda answer, ends, shortest: False)
    script.main()
    assert "only 0 of 5 prompts are fit" in capsys.readouterr().out
