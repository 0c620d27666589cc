"""Every preflight check on a GPU: compiled flex attention, bfloat16, and the target's own dtype."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from slipstream.config import DataConfig, DrafterSettings, Recipe, RunConfig, TargetConfig
from slipstream.preflight import CHECKS, run_preflight
from support.tiny import save_tiny_target, write_conversations

pytestmark = pytest.mark.gpu

SHAPES = {
    "full": {"layers": 2},
    "mixed": {"layers": 2, "layer_types": ("sliding_attention", "full_attention"), "sliding_window": 12},
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_every_check_passes(
    family: str, shape: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    data = write_conversations(tmp_path / "train.jsonl", 8, turns=2)
    recipe = Recipe(
        target=TargetConfig(path=str(save_tiny_target(tmp_path / "target", family)), dtype=dtype),
        data=DataConfig(train=(str(data),), row_length=256),
        drafter=DrafterSettings(block_size=8, head_dim=64, heads=4, kv_heads=2, **SHAPES[shape]),
        run=RunConfig(device="cuda", directory=str(tmp_path / "run")),
    )
    report = run_preflight(recipe, console=Console(width=300))
    assert report.passed, report.as_json()
    assert [r.name for r in report.results] == list(CHECKS)
