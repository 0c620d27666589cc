"""The embedded target's training: it learns, goes on from a state, and writes what transformers loads."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from support.scripts import load
from support.tiny import tiny_tokenizer

script = load("train_target")


def write_tokens(directory: Path) -> Path:
    """Write rows that count upwards, so that there is something to learn, and a tokenizer."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|endoftext|>"]})
    tokenizer.save_pretrained(directory / "tokenizer")
    rows = (np.arange(64 * 130) % 97).astype(np.uint16)
    for name in ("train", "heldout", "functions", "functions_heldout"):
        rows.tofile(directory / f"{name}.bin")
    for name in ("functions", "functions_heldout"):
        (rows % 2).astype(np.uint8).tofile(directory / f"{name}_mask.bin")
    return directory


def run(directory: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> list[dict[str, float]]:
    arguments = {
        "tokens": directory, "out": directory / "out", "state": directory / "state.pt", "device": "cpu", "hidden": 128,
        "ffn": 64, "layers": 4, "key-heads": 1, "length": 64, "rows": 20, "minutes": 0.2,
    }  # fmt: skip
    given = [part for name, value in arguments.items() for part in (f"--{name}", str(value))]
    monkeypatch.setattr("sys.argv", ["train_target", *given, "--no-compile", *more])
    for name in ("torch_chunk_gated_delta_rule", "causal_conv1d_fn", "torch_causal_conv1d_fn"):
        if hasattr(script.modeling, name):  # the script's own process ends with it; this one goes on
            monkeypatch.setattr(script.modeling, name, getattr(script.modeling, name))
    script.main()
    text = (directory / "out" / "training_log.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def test_it_learns_stops_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tokens(tmp_path)
    run(tmp_path, monkeypatch, "--stop-after", "0.08")
    first = torch.load(tmp_path / "state.pt")
    log = run(tmp_path, monkeypatch)
    held = torch.load(tmp_path / "state.pt")
    starts = [line["resumed_at"] for line in log if "resumed_at" in line]
    assert starts == [0, first["step"]]
    assert held["step"] > first["step"] > 0
    assert held["read"][1] > first["read"][1] > 0  # functions have been read, more of them while the rate falls
    assert held["read"][0] + held["read"][1] == 20 * held["step"]
    assert {"heldout", "heldout_functions"} <= set(log[-1])
    ends = [line["heldout"] for line in log if "minutes" in line and "heldout" in line]
    assert len(ends) == 2
    assert ends[1] < ends[0]
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.config.model_type == "qwen3_5_text"
    assert next(model.parameters()).dtype == torch.bfloat16
    ends = AutoTokenizer.from_pretrained(tmp_path / "out").convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert model.config.eos_token_id == ends


def test_only_masked_tokens_of_functions_are_learned(tmp_path: Path) -> None:
    write_tokens(tmp_path)
    rows = script.Rows(
        tmp_path / "functions.bin", 64, torch.device("cpu"), seed=0, mask=tmp_path / "functions_mask.bin"
    )
    ids, labels = rows.batch(rows.count - 3, 6)  # over the end of an epoch
    learned = labels != script.IGNORED
    assert torch.equal(learned, (ids + 1) % 97 % 2 == 1)
    assert torch.equal(labels[learned], ((ids + 1) % 97)[learned])
    again, _ = rows.batch(rows.count - 3, 6)
    assert torch.equal(ids, again)


def test_the_rate_rises_stays_and_falls_to_nothing() -> None:
    assert script.factor(0, 0.0) == pytest.approx(1 / script.WARMUP_STEPS)
    assert script.factor(1000, 0.5) == 1.0
    assert script.factor(1000, 1 - script.DECAY_SHARE / 2) == pytest.approx(0.5)
    assert script.factor(1000, 1.0) == 0.0
