"""What is shipped is what was measured, fits, and tells nothing of the machine that made it."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from slipstream import pairs
from slipstream.evaluation.command import evaluate_path
from slipstream.export.zlab import export_run
from slipstream.quickstart.curve import learning_curve
from slipstream.recipe import load_recipe
from support.scripts import load
from support.tiny import save_tiny_target, write_conversations
from support.tiny_run import overrides, quiet_train

script = load("ship_pair", "scripts")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a target, an evaluated run, its export, answers and held-out prompts with a report."""
    root = tmp_path_factory.mktemp("made")
    save_tiny_target(root / "target", "qwen3_5")
    write_conversations(root / "train.jsonl", 20)
    write_conversations(root / "heldout.jsonl", 3)
    (root / "heldout.jsonl.report.json").write_text("{}", encoding="utf-8")
    changes = {"data__heldout": root / "heldout.jsonl", "training__evaluate_every": 2, "training__preflight": "false"}
    recipe = load_recipe(None, overrides(root, root / "run", **changes))
    quiet_train(recipe)
    console = Console(file=io.StringIO())
    evaluate_path(root / "run", console=console)
    export_run(root / "run", root / "export", console=console)
    return root


def ship(root: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> None:
    arguments = {
        "run": "run",
        "export": "export",
        "target": "target",
        "answers": "train.jsonl",
        "heldout": "heldout.jsonl",
    }
    given = [part for name, value in arguments.items() for part in (f"--{name}", str(root / value))]
    monkeypatch.setattr("sys.argv", ["ship_pair", "embedded", *given, "--count", "12", *more])
    script.main()


def test_a_pair_is_whole_and_tells_nothing_of_the_machine(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "PAIRS", tmp_path)
    monkeypatch.setattr(pairs, "_ROOT", tmp_path)
    ship(made, monkeypatch)
    pair = tmp_path / "embedded"
    assert pairs.shipped_drafter("embedded") == pair / "drafter"
    assert pairs.target_directory("embedded") == pair / "target"
    with gzip.open(pair / "answers_train.jsonl.gz", "rt", encoding="utf-8") as lines:
        assert sum(1 for _ in lines) == 12
    recipe = load_recipe(pair / "run" / "recipe.toml")
    assert (recipe.target.path, recipe.data.train) == ("embedded", ("answers_train.jsonl.gz",))
    assert recipe.drafter.layers == 2
    assert [p.step for p in learning_curve(pair / "run" / "metrics.jsonl")] == [2, 4]
    assert "| absl-py | 2.5.0 | Apache-2.0 | training |" in (pair / "NOTICE.md").read_text(encoding="utf-8")
    evaluation = json.loads((pair / "run" / "evaluation.json").read_text(encoding="utf-8"))
    assert evaluation["tau"] >= 1
    for path in sorted(pair.rglob("*")):
        if path.suffix in (".json", ".toml", ".jsonl", ".md"):
            text = path.read_text(encoding="utf-8")
            assert str(made) not in text, path
            assert '"host"' not in text
            assert '"pid"' not in text


def test_what_was_not_measured_or_is_too_large_is_refused(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "PAIRS", tmp_path)
    monkeypatch.setattr(script, "MOST_BYTES", {"embedded": 1000})
    with pytest.raises(SystemExit, match="the package holds 1,000 of them"):
        ship(made, monkeypatch)
    monkeypatch.setattr(script, "MOST_BYTES", {"embedded": 10**9})
    save_tiny_target(tmp_path / "other", "qwen3_5", seed=1)
    with pytest.raises(SystemExit, match="is not the one that"):
        ship(made, monkeypatch, "--target", str(tmp_path / "other"))
    monkeypatch.setattr(script, "weights_digest", lambda _: "another")
    with pytest.raises(SystemExit, match="measured other weights"):
        ship(made, monkeypatch)


def test_metrics_keep_evaluations_their_training_lines_and_both_ends() -> None:
    lines = []
    for step in range(2000):
        lines.append(json.dumps({"kind": "train", "step": step}))
        if step % 500 == 499:
            lines.append(json.dumps({"kind": "evaluation", "step": step}))
    kept = [json.loads(line) for line in script.thinned_metrics(lines)]
    assert [r["step"] for r in kept if r["kind"] == "evaluation"] == [499, 999, 1499, 1999]
    assert {0, 499, 999, 1499, 1999} <= {r["step"] for r in kept if r["kind"] == "train"}
    assert len(kept) < 400
