"""``evaluate`` with a block size of its own, or with several that it tries first, and what it tells and records."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from slipstream.config import DrafterSettings, TargetConfig
from slipstream.decoding.block_trial import BlockComparison, TriedBlock
from slipstream.drafter.config import resolve
from slipstream.drafter.model import DraftModel
from slipstream.drafter.store import save_drafter
from slipstream.errors import ConfigError
from slipstream.evaluation import measure
from slipstream.evaluation.command import evaluate_path
from slipstream.evaluation.display import TrialDisplay, comparison_lines, print_comparison
from slipstream.target.model import load_target
from support.tiny import save_tiny_target, write_conversations


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hybrid target, a drafter of random weights that was made for blocks of 6, and 26 held-out prompts."""
    root = Path(tmp_path_factory.mktemp("evaluate"))
    save_tiny_target(root / "target", "qwen3_5")
    write_conversations(root / "heldout.jsonl", 26)
    write_conversations(root / "train.jsonl", 5)
    target = load_target(TargetConfig(path=str(root / "target")), device=torch.device("cpu"), dtype=torch.float32)
    config = resolve(DrafterSettings(layers=1, block_size=6, target_layer_ids=(1, 4)), target.info, 300)
    save_drafter(DraftModel(config), config, root / "drafter", dtype=torch.float32)
    (root / "recipe.toml").write_text(
        f'[target]\npath = "{root}/target"\n[data]\nheldout = ["{root}/heldout.jsonl"]\n'
        f'train = ["{root}/train.jsonl"]\n[evaluation]\nmax_new_tokens = 6\nbatch_size = 4\n[run]\ndevice = "cpu"\n'
    )
    return root


def run(place: Path, *overrides: str) -> tuple[dict[str, Any], str]:
    told = io.StringIO()
    output = place / "evaluation.json"
    console = Console(file=told, width=200)
    evaluate_path(place / "recipe.toml", overrides, drafter=place / "drafter", output=output, console=console)
    return json.loads(output.read_text()), told.getvalue()


def test_sizes_are_tried_and_the_fastest_is_used(place: Path) -> None:
    record, told = run(place, "--evaluation.compare-block-sizes", "3", "6", "2")
    comparison = record["block_comparison"]
    assert [t["block_size"] for t in comparison["tried"]] == [3, 6, 2]
    best = max(comparison["tried"], key=lambda t: t["tokens_per_second"])["block_size"]
    assert (record["block_size"], comparison["chosen"], record["baselines_block_size"]) == (best, best, best)
    assert (record["block_size_from"], record["trained_block_size"]) == ("comparison", 6)
    assert (record["prompts"], comparison["prompts"], comparison["separate"]) == (18, 8, True)
    assert len(record["histogram"]) == best
    assert record["lossless"]["equal"] == 18
    assert (record["linear_layers"], record["recurrent_layers"]) == ("laid out once", "short blocks")
    assert "after trying blocks of 3, 6 and 2" in told
    assert "trying blocks of 3, 6 and 2 on 8 prompts" in told
    assert f"block {best} is used: " in told


def test_a_size_of_ones_own_is_used(place: Path) -> None:
    record, told = run(place, "--evaluation.block-size", "3")
    assert (record["block_size"], record["block_size_from"], record["prompts"]) == (3, "evaluation.block_size", 26)
    assert "block_comparison" not in record
    assert "in blocks of 3" in told
    assert "block 3 (trained with 6), 26 prompts" in told
    record, told = run(place, "--evaluation.block-size", "3", "--evaluation.draft-whole-block", "true")
    assert (record["block_size"], record["drafted_block_size"]) == (3, 6)
    assert "block 3 (the first of 6), 26 prompts" in told
    longer, _ = run(place)
    assert (longer["block_size"], longer["block_size_from"], longer["baselines_block_size"]) == (6, "training", 6)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--evaluation.block-size", "7"], "block_size is 7, but the drafter was trained with 6; use 2 to 6"),
        (["--evaluation.compare-block-sizes", "4", "9"], "compare_block_sizes holds 9, but the drafter"),
    ],
)
def test_a_size_that_the_drafter_does_not_have_is_refused_before_the_target_is_loaded(
    place: Path, overrides: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("the target was loaded")

    monkeypatch.setattr("slipstream.target.model.load_target", never)
    with pytest.raises(ConfigError, match=message):
        run(place, *overrides)


def test_sizes_that_no_drafter_has_are_refused_before_anything(place: Path) -> None:
    console = Console(file=io.StringIO())
    with pytest.raises(ConfigError, match="block_size is 1; a block"):
        evaluate_path(place / "recipe.toml", ["--evaluation.block-size", "1"], drafter=place, console=console)


def test_a_dry_run_says_what_would_be_tried(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "evaluate_drafter", None)
    told = io.StringIO()
    overrides = ["--evaluation.compare-block-sizes", "4"]
    console = Console(file=told, width=300)
    evaluate_path(place / "recipe.toml", overrides, drafter=place / "drafter", dry_run=True, console=console)
    assert told.getvalue().rstrip().endswith("after trying blocks of 4")


def comparison(ratios: dict[int, float], **changes: Any) -> BlockComparison:
    tried = tuple(
        TriedBlock(block_size=b, tau=2.0, tokens_per_second=100 * r, ratio=r, spread=0.1) for b, r in ratios.items()
    )
    base: dict[str, Any] = {
        "chosen": max(ratios, key=lambda b: ratios[b]),
        "tried": tried,
        "plain_tokens_per_second": 100.0,
        "plain_spread": 0.1,
        "prompts": 8,
        "separate": True,
        "max_new_tokens": 64,
        "batch_size": 4,
        "repeats": 3,
    }
    return BlockComparison(**{**base, **changes})


def test_the_reason_is_told() -> None:
    (line,) = comparison_lines(comparison({4: 1.3, 6: 1.5, 8: 1.2}))
    assert line.startswith("block 6 is used: 1.50 x plain decoding, the fastest; block 4 gives 1.30 (shortest of 3")
    (line,) = comparison_lines(comparison({4: 1.3}))
    assert "the only one tried" in line


def test_what_makes_a_choice_weak_is_told() -> None:
    lines = comparison_lines(comparison({4: 0.90, 6: 0.89}, separate=False, plain_spread=0.8))
    assert len(lines) == 5
    for part in ("loses least", "too close to tell apart", "up to 80%", "the evaluation has the same prompts"):
        assert any(part in line for line in lines)


def test_the_table_holds_every_size() -> None:
    told = io.StringIO()
    print_comparison(comparison({4: 1.3, 6: 1.5}), Console(file=told, width=120))
    rows = told.getvalue().splitlines()
    assert any("none (plain)" in row and "100.0" in row for row in rows)
    assert any(" 6 " in row and "150.0" in row and "1.50" in row for row in rows)


def test_a_terminal_gets_a_bar() -> None:
    told = io.StringIO()
    with TrialDisplay(Console(file=told, width=120, force_terminal=True), (4, 8), 16) as display:
        for done in range(1, 5):
            display.update(done, 4)
    assert "trying blocks of 4 and 8 on 16 prompts" in told.getvalue()


def test_records_are_plain_json() -> None:
    tree = json.loads(json.dumps(comparison({4: 1.3}).as_json()))
    assert tree["tried"] == [dataclasses.asdict(comparison({4: 1.3}).tried[0])]
