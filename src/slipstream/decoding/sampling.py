"""How the target picks a token: argmax, or a sample driven by one uniform number for each prompt and output position.

The uniform number belongs to the position, not to the pass, so a token that a verify pass computes and discards is
computed again from the same number when its position is really reached. That keeps sampling exact: the token at output
position n is a function of the true prefix and of u_n only, and u_n is independent of the prefix. It also makes plain
and block decoding give the same sampled text, whatever the batch.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from slipstream.errors import DecodingError


def uniforms(seed: int, index: int, count: int) -> Tensor:
    """Return ``count`` uniform numbers in [0, 1) for prompt ``index``: float64, on the CPU, no hidden state."""
    words = np.random.SeedSequence((seed & 0xFFFFFFFFFFFFFFFF, index)).generate_state(2, np.uint32)
    generator = torch.Generator().manual_seed(int(words[0]) << 31 ^ int(words[1]))
    return torch.rand(count, generator=generator, dtype=torch.float64)


def choose(logits: Tensor, temperature: float, noise: Tensor | None) -> tuple[Tensor, Tensor]:
    """Pick the target's tokens.

    Args:
        logits: ``[..., V]``, any float dtype.
        temperature: 0 is argmax; above it, softmax(logits / temperature) is sampled by inverting its distribution
            function in float64.
        noise: ``[...]`` float64 uniforms; needed when temperature > 0.

    Returns:
        tokens ``[...]`` int64 and finite ``[...]`` bool: False where the logits hold NaN or +inf. No host sync.
    """
    top, best = logits.max(dim=-1)
    finite = torch.isfinite(top)
    if temperature == 0:
        return best, finite
    if noise is None:
        raise DecodingError(f"temperature is {temperature} but no noise was given; draw it with uniforms()")
    weights = ((logits.double() - top.double().unsqueeze(-1)) / temperature).exp_()
    cumulative = weights.cumsum(dim=-1)
    threshold = noise.unsqueeze(-1) * cumulative[..., -1:]
    tokens = torch.searchsorted(cumulative, threshold, right=True).squeeze(-1)
    return tokens.clamp_(max=logits.shape[-1] - 1), finite


def check_temperature(temperature: float) -> None:
    """Refuse a temperature that is negative or not a number. Raises DecodingError."""
    if not 0 <= temperature < float("inf"):
        raise DecodingError(f"temperature is {temperature}; it must be 0 (greedy) or a positive number")
