"""The memory estimate: its large parts, and how they grow; and what a plan downloads."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from slipstream.config import TrainingConfig
from slipstream.drafter.config import DrafterConfig
from slipstream.errors import DataError
from slipstream.training import plan as planning
from slipstream.training.plan import memory_estimate, plan
from support.tiny_run import make_inputs, tiny_recipe

# The shape of a drafter for an 8B target.
CONFIG = DrafterConfig(
    layers=5,
    block_size=16,
    target_layer_ids=(1, 9, 17, 25, 33),
    mask_token_id=151669,
    num_target_layers=36,
    hidden_size=4096,
    intermediate_size=12288,
    heads=32,
    kv_heads=8,
    head_dim=128,
    vocab_size=151936,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    max_position_embeddings=40960,
    layer_types=("full_attention",) * 5,
)


def estimate(training: TrainingConfig, **changes: object) -> dict[str, int]:
    sizes = {
        "row_length": 3072,
        "weight_bytes": 16 * 1_048_600_000,
        "target_bytes": 16_000_000_000,
        "feature_bytes": 2,
        "compute_bytes": 2,
        "chunk": 435,
        "dense": False,
        **changes,
    }
    return memory_estimate(training, CONFIG, **sizes)  # type: ignore[arg-type]


def test_the_parts_are_of_the_right_size():
    sizes = estimate(TrainingConfig(anchors=512))
    assert sizes["drafter weights, gradients, moments"] == 16 * 1_048_600_000
    assert sizes["context features"] == 3072 * 5 * 4096 * 2
    assert sizes["logits"] == 435 * 151936 * 8
    assert 5e9 < sizes["activations"] < 2e10


def test_it_grows_with_rows_anchors_and_the_dense_mask():
    base = estimate(TrainingConfig(anchors=512))
    more = estimate(TrainingConfig(anchors=512, rows=2))
    assert more["activations"] == 2 * base["activations"]
    assert more["drafter weights, gradients, moments"] == base["drafter weights, gradients, moments"]
    assert estimate(TrainingConfig(anchors=1024))["activations"] > 1.5 * base["activations"]
    assert "dense attention" in estimate(TrainingConfig(), dense=True)
    few = dataclasses.replace(TrainingConfig(), anchors=1)
    assert estimate(few)["logits"] == 15 * 151936 * 8


def test_soft_labels_take_final_states_and_a_second_chunk_of_logits():
    base, soft = estimate(TrainingConfig()), estimate(TrainingConfig(labels="soft"))
    assert soft["context features"] - base["context features"] == 3072 * 4096 * 2
    assert soft["logits"] == 1.5 * base["logits"]
    others = set(base) - {"context features", "logits"}
    assert {name: base[name] for name in others} == {name: soft[name] for name in others}


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({}, "hard: the data's tokens"),
        ({"training__labels": "soft"}, "soft: the target's distribution"),
        (
            {"training__labels": "soft", "training__soft_share": 0.25},
            "soft: the target's distribution, 25%, beside the data's tokens",
        ),
    ],
)
def test_the_plan_names_the_labels(tmp_path: Path, settings: dict, told: str):
    make_inputs(tmp_path)
    assert plan(tiny_recipe(tmp_path, tmp_path / "run", **settings))["labels"] == told


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_plan_counts_the_optimizers_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str):
    make_inputs(tmp_path)
    asked: dict[str, int] = {}
    real = planning.memory_estimate

    def noted(*args: object, **given: object) -> dict[str, int]:
        asked.update(real(*args, **given))  # type: ignore[arg-type]
        return asked

    monkeypatch.setattr(planning, "memory_estimate", noted)
    told = plan(tiny_recipe(tmp_path, tmp_path / "run", training__optimizer=optimizer))
    parameters = int(told["drafter parameters"].replace(",", ""))
    share = asked["drafter weights, gradients, moments"] / parameters
    assert share == 16 if optimizer == "adamw" else 12 < share < 12.1  # the norms have two moments still
    muon = r"muon for matrices, peak 0\.02, [\d.e-]+ TFLOP a step; adamw for norms, peak 0\.0006"
    assert re.fullmatch(muon if optimizer == "muon" else r"adamw, peak 0\.0006", told["optimizer"])


def test_the_plan_of_a_hub_id_downloads_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import huggingface_hub

    make_inputs(tmp_path)
    (tmp_path / "target" / "model.safetensors").unlink()
    asked: list[str] = []

    def download(hub_id: str, *, allow_patterns: list[str], **_: object) -> str:
        asked.extend(allow_patterns)
        return str(tmp_path / "target")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    shown = plan(tiny_recipe(tmp_path, tmp_path / "run", target__path="owner/model"))
    assert not [p for p in asked if p.endswith((".safetensors", ".bin"))]
    assert shown["target digest"] == "known once the weights are downloaded"


def test_the_plan_reads_the_held_out_prompts(tmp_path: Path):
    make_inputs(tmp_path)
    told = plan(tiny_recipe(tmp_path, tmp_path / "run", data__heldout=tmp_path / "train.jsonl"))
    assert told["held-out prompts"] == "2 decoded while training"
    assert "20 of 20 held-out prompts" in told["warning"]
    with pytest.raises(DataError, match=r"missing\.jsonl"):
        plan(tiny_recipe(tmp_path, tmp_path / "run", data__heldout=tmp_path / "missing.jsonl"))
