"""Resolve ``auto``: the device, the drafter's compute dtype and its attention. The caller prints it."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Literal

import torch

from slipstream.errors import TrainingError
from slipstream.target.source import has_bfloat16


def resolve_device(requested: str) -> torch.device:
    """Return the device of ``run.device``: auto, cpu, cuda or cuda:N. Raises TrainingError where it does not exist."""
    if requested == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(requested)
    except RuntimeError:
        raise TrainingError(f"run.device is {requested!r}; use auto, cpu, cuda or cuda:N") from None
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise TrainingError(f"run.device is {requested!r}; use auto, cpu, cuda or cuda:N")
    if not torch.cuda.is_available():
        raise TrainingError(
            f"run.device is {requested!r}, but torch {torch.__version__} sees no CUDA device; "
            "use --run.device cpu, or install a CUDA build of torch"
        )
    index = device.index or 0
    if index >= torch.cuda.device_count():
        raise TrainingError(
            f"run.device is {requested!r}, but there are {torch.cuda.device_count()} GPUs, counted from 0"
        )
    return torch.device("cuda", index)


def device_name(device: torch.device) -> str:
    """Return the model of a GPU, or of the processor: results are equal to the bit on one model only."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, "") or platform.processor() or platform.machine()


def resolve_precision(requested: Literal["auto", "bfloat16", "float32"], device: torch.device) -> torch.dtype:
    """Return the compute dtype of the drafter's matmuls; weights and optimizer state are float32 whatever it is."""
    if requested == "float32":
        return torch.float32
    if requested == "bfloat16":
        return torch.bfloat16
    return torch.bfloat16 if has_bfloat16(device) else torch.float32


def resolve_attention(requested: Literal["auto", "flex", "dense"], device: torch.device) -> Literal["flex", "dense"]:
    """Return the drafter's attention: compiled block-sparse on a GPU, the exact dense reference on a CPU."""
    if requested == "auto":
        return "flex" if device.type == "cuda" else "dense"
    if requested == "flex" and device.type != "cuda":
        raise TrainingError("training.attention is flex, which is compiled for a GPU, but the device is cpu; use dense")
    return requested
