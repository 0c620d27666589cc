"""What ``auto`` becomes, and what does not exist."""

from __future__ import annotations

import pytest
import torch

from slipstream.errors import TrainingError
from slipstream.training import hardware

CPU = torch.device("cpu")


def test_auto_takes_what_is_there(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert hardware.resolve_device("auto") == CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert hardware.resolve_device("auto") == torch.device("cuda", 0)


def test_an_absent_gpu_is_an_error_not_a_slow_run(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(TrainingError, match=r"run\.device is 'cuda'.*sees no CUDA device"):
        hardware.resolve_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert hardware.resolve_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(TrainingError, match="there are 2 GPUs, counted from 0"):
        hardware.resolve_device("cuda:2")


@pytest.mark.parametrize("name", ["gpu", "meta", "cuda:x"])
def test_other_names_are_refused(name: str):
    with pytest.raises(TrainingError, match="use auto, cpu, cuda or cuda:N"):
        hardware.resolve_device(name)


def test_precision_follows_the_hardware(monkeypatch: pytest.MonkeyPatch):
    for found, expected in (
        ({"avx512_bf16": True}, torch.bfloat16),
        ({"amx_bf16": True}, torch.bfloat16),
        ({"avx2": True}, torch.float32),
    ):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda found=found: found, raising=False)
        assert hardware.resolve_precision("auto", CPU) == expected
    assert hardware.resolve_precision("float32", CPU) == torch.float32
    assert hardware.resolve_precision("bfloat16", CPU) == torch.bfloat16


def test_attention_follows_the_device():
    assert hardware.resolve_attention("auto", CPU) == "dense"
    assert hardware.resolve_attention("auto", torch.device("cuda")) == "flex"
    assert hardware.resolve_attention("dense", torch.device("cuda")) == "dense"
    with pytest.raises(TrainingError, match=r"training\.attention is flex.*use dense"):
        hardware.resolve_attention("flex", CPU)


def test_the_device_has_a_name(monkeypatch: pytest.MonkeyPatch):
    name = hardware.device_name(torch.device("cpu"))
    assert name
    assert "\n" not in name
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}")
    assert hardware.device_name(torch.device("cuda", 1)) == "GPU 1"
