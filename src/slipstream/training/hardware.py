"""Resolve ``auto``: the device, the drafter's compute dtype and its attention. The caller prints it."""

from __future__ import annotations

from typing import Literal

import torch

from slipstream.errors import TrainingError


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


def has_bfloat16(device: torch.device) -> bool:
    """Say whether ``device`` multiplies bfloat16 in hardware: CUDA from 8.0, CPUs with AVX512-BF16 or AMX."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device)[0] >= 8
    if hasattr(torch.cpu, "get_capabilities"):
        found = torch.cpu.get_capabilities()
        return bool(found.get("avx512_bf16") or found.get("amx_bf16"))
    probes = [getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")]
    return any(probe() for probe in probes if probe is not None)


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
