"""The state of Gated DeltaNet layers after any number of a block's tokens, for all layers and rows in one calculation.

A layer's state after t tokens (arXiv 2412.06464), per head, with key k_t (normed), value v_t, decay g_t <= 0, rate
b_t::

    S_t = exp(g_t) S_{t-1} + k_t u_t^T          u_t = b_t (v_t - exp(g_t) S_{t-1}^T k_t)

With G_t = g_1 + ... + g_t, the u of a block solve one unit lower-triangular system, and the state follows at once::

    u_i + sum_{j<i} b_i exp(G_i - G_j) (k_i . k_j) u_j = b_i (v_i - exp(G_i) S_0^T k_i)
    S   = exp(G_T) S_0 + sum_j exp(G_T - G_j) k_j u_j^T

A rejected token is one with g = 0 and b = 0: it changes nothing. So rows with different counts need no grouping. What a
layer computed of its tokens (its input projections) is taken from the verify pass, so that no weight is read again.

Shape letters: L layers, R rows, Q block tokens, W convolution width, X convolution channels, K key heads, V value
heads, D key head size, E value head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

PROJECTIONS = ("in_proj_qkv", "in_proj_a", "in_proj_b")
_ATTRIBUTES = (
    *PROJECTIONS,
    "conv1d",
    "A_log",
    "dt_bias",
    "key_dim",
    "value_dim",
    "num_k_heads",
    "num_v_heads",
    "head_k_dim",
    "head_v_dim",
)
_CHUNK_BYTES = 256 * 2**20
EPS = 1e-6


def is_gated_delta(module: Any) -> bool:
    """Return whether ``module`` has the parts of a Gated DeltaNet whose projections are separate (Qwen3.5, Qwen3.6)."""
    return all(hasattr(module, name) for name in _ATTRIBUTES) and getattr(module, "activation", None) == "silu"


def advance(state: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor, counts: Tensor) -> Tensor:
    """Return the states after the first ``counts`` tokens. float32 throughout.

    state ``[N, V, D, E]``; key ``[N, Q, K, D]``; value ``[N, Q, V, E]``; decay and rate ``[N, Q, V]``; counts ``[N]``.
    """
    kept = (torch.arange(key.shape[1], device=key.device) < counts[:, None])[..., None]
    total = torch.where(kept, decay.float(), 0.0).cumsum(dim=1).transpose(1, 2)
    rate = torch.where(kept, rate.float(), 0.0).transpose(1, 2)[..., None]
    key = key.float()
    key = key * torch.rsqrt(key.square().sum(-1, keepdim=True) + EPS)
    key = key.repeat_interleave(value.shape[2] // key.shape[2], dim=2).transpose(1, 2)
    state, value = state.float(), value.float().transpose(1, 2)
    # The upper part would overflow: there exp takes a positive sum. The solver reads below the diagonal only.
    pairwise = (total[..., :, None] - total[..., None, :]).tril().exp()
    system = rate * (key @ key.transpose(-1, -2)) * pairwise
    right = rate * (value - total.exp()[..., None] * (key @ state))
    update = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    end = total[..., -1:]
    weighted = key * (end - total).exp()[..., None]
    advanced: Tensor = state * end.exp()[..., None] + weighted.transpose(-1, -2) @ update
    return advanced


def advance_layers(
    modules: Sequence[Any],
    projected: Sequence[dict[str, Tensor]],
    conv_states: Sequence[Tensor],
    states: Sequence[Tensor],
    rows: Tensor,
    counts: Tensor,
    most: int,
) -> tuple[list[Tensor], list[Tensor]]:
    """Return each layer's convolution and recurrent states of ``rows`` after ``counts`` tokens.

    modules: L Gated DeltaNets of one shape; projected: for each, its ``PROJECTIONS``' outputs ``[R, Q, ...]``;
    conv_states ``[R, X, W]`` and states ``[R, V, D, E]``: those before the block; rows, counts ``[P]`` int64; most: the
    largest count, on the host.
    """
    if not modules:
        return [], []
    chunk = max(1, _CHUNK_BYTES // max(1, len(rows) * states[0][0].numel() * 4))
    new_conv: list[Tensor] = []
    new_states: list[Tensor] = []
    for at in range(0, len(modules), chunk):
        part = slice(at, at + chunk)
        conv, state = _advance_chunk(
            modules[part], projected[part], conv_states[part], states[part], rows, counts, most
        )
        new_conv.extend(conv)
        new_states.extend(state)
    return new_conv, new_states


def _advance_chunk(
    modules: Sequence[Any],
    projected: Sequence[dict[str, Tensor]],
    conv_states: Sequence[Tensor],
    states: Sequence[Tensor],
    rows: Tensor,
    counts: Tensor,
    most: int,
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """As ``advance_layers``, for layers whose states fit in memory at once."""
    one, layers, picked = modules[0], len(modules), len(rows)
    mixed = torch.stack([p["in_proj_qkv"][rows, :most] for p in projected]).transpose(2, 3)
    seen = torch.cat([torch.stack([c[rows] for c in conv_states]), mixed], dim=-1)
    channels, width = seen.shape[2], conv_states[0].shape[-1]
    columns = counts[:, None] + torch.arange(width, device=rows.device)
    conv = seen.gather(3, columns[None, :, None, :].expand(layers, -1, channels, -1))

    # Written out: a grouped convolution with this many groups is slow, and these are a few multiplications.
    weight = torch.stack([m.conv1d.weight.squeeze(1) for m in modules]).float()[:, None]
    out = torch.zeros(mixed.shape, dtype=torch.float32, device=mixed.device)
    for w in range(width):
        out = out + weight[..., w, None] * seen[..., w + 1 : w + 1 + most]
    if one.conv1d.bias is not None:
        out = out + torch.stack([m.conv1d.bias for m in modules]).float()[:, None, :, None]
    out = F.silu(out.to(mixed.dtype)).transpose(2, 3)
    _, key, value = out.split([one.key_dim, one.key_dim, one.value_dim], dim=-1)

    rate = torch.stack([p["in_proj_b"][rows, :most] for p in projected]).sigmoid()
    step = torch.stack([p["in_proj_a"][rows, :most] for p in projected]).float()
    scale = torch.stack([m.A_log for m in modules]).float().exp()[:, None, None]
    decay = -scale * F.softplus(step + torch.stack([m.dt_bias for m in modules])[:, None, None])
    advanced = advance(
        torch.stack([s[rows] for s in states]).flatten(0, 1),
        key.reshape(layers * picked, most, one.num_k_heads, one.head_k_dim),
        value.reshape(layers * picked, most, one.num_v_heads, one.head_v_dim),
        decay.flatten(0, 1),
        rate.flatten(0, 1),
        counts.repeat(layers),
    )
    return list(conv), list(advanced.view(layers, picked, *advanced.shape[1:]))
