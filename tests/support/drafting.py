"""Tiny drafters and packed batches for the drafter's tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from slipstream.drafter.anchors import Blocks, sample_blocks
from slipstream.drafter.config import FULL, SLIDING, DrafterConfig
from slipstream.records import PackedBatch

MASK_ID = 319


def tiny_drafter_config(**changes: Any) -> DrafterConfig:
    """Return the config of a drafter with two layers, hidden size 32 and grouped heads; ``sliding`` is a window."""
    window = changes.pop("sliding", 0)
    base: dict[str, Any] = {
        "layers": 2,
        "block_size": 4,
        "target_layer_ids": (1, 3),
        "mask_token_id": MASK_ID,
        "num_target_layers": 8,
        "hidden_size": 32,
        "intermediate_size": 48,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 16,
        "vocab_size": 320,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "layer_types": (SLIDING, FULL) if window else (FULL, FULL),
        "sliding_window": window,
    }
    return DrafterConfig(**{**base, **changes})


def packed_batch(rows: Sequence[Sequence[int]], length: int, *, seed: int = 0, supervised: float = 0.85) -> PackedBatch:
    """Pack documents of the given lengths into rows; the rest of a row is padding. Loss masks are random."""
    draw = torch.Generator().manual_seed(seed)
    documents = torch.full((len(rows), length), -1)
    positions = torch.zeros(len(rows), length, dtype=torch.int64)
    for row, lengths in enumerate(rows):
        start = 0
        for number, tokens in enumerate(lengths):
            documents[row, start : start + tokens] = number
            positions[row, start : start + tokens] = torch.arange(tokens)
            start += tokens
        assert start <= length
    real = documents >= 0
    return PackedBatch(
        index=0,
        ids=torch.randint(0, 300, real.shape, generator=draw),
        loss_mask=(torch.rand(real.shape, generator=draw) < supervised) & real,
        document_ids=documents,
        positions=positions,
    )


def draw_blocks(
    batch: PackedBatch, config: DrafterConfig, anchors: int, seed: int = 0, *, short_share: float = 0.0
) -> Blocks:
    """Sample blocks with a fresh generator."""
    return sample_blocks(
        batch,
        anchors=anchors,
        block_size=config.block_size,
        mask_token_id=config.mask_token_id,
        generator=torch.Generator().manual_seed(seed),
        short_share=short_share,
    )


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Return normal draws of a seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def randomise(module: torch.nn.Module, seed: int = 0, scale: float = 0.2) -> torch.nn.Module:
    """Give every parameter random values, norms around 1, so that no term of the network is invisible."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=draw) * scale
            parameter.copy_(noise if parameter.dim() >= 2 else 1 + noise)
    return module
