"""The gated delta rule over whole sequences, in chunks, in plain PyTorch: for training on any GPU.

Per head, with normed key k_t, value v_t, decay g_t <= 0 and rate b_t (arXiv 2412.06464)::

    S_t = exp(g_t) S_{t-1} + k_t u_t^T        u_t = b_t (v_t - exp(g_t) S_{t-1}^T k_t)        o_t = S_t^T q_t / sqrt(D)

Inside a chunk the u solve one unit lower-triangular system; between chunks only the state is carried.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64


def unit_lower_inverse(below: Tensor, block: int = 16) -> Tensor:
    """Return ``(I + below)^-1`` of a strictly lower-triangular ``[..., C, C]``; C is ``block`` times a power of 2.

    Diagonal blocks by the series I - A + A^2 - ..., which ends and whose terms stay small in blocks of 16; two halves
    are joined by ``[[P, 0], [-R B P, R]]``.
    """
    size = below.shape[-1]
    if size <= block:
        eye = torch.eye(size, device=below.device, dtype=below.dtype)
        power, inverse = -below, eye - below
        for _ in range((size - 1).bit_length() - 1):
            power = power @ power
            inverse = inverse + inverse @ power
        return inverse
    half = size // 2
    # Both halves in one batch.
    corners = torch.stack((below[..., :half, :half], below[..., half:, half:]))
    first, second = unit_lower_inverse(corners, block)
    joint = -second @ (below[..., half:, :half] @ first)
    top = torch.cat((first, torch.zeros_like(joint)), dim=-1)
    return torch.cat((top, torch.cat((joint, second), dim=-1)), dim=-2)


def chunked_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = CHUNK,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, None]:
    """Return ``[B, T, V, E]`` in the query's dtype, and no state: a drop-in for training forwards.

    query, key ``[B, T, K, D]``; value ``[B, T, V, E]``; g, beta ``[B, T, V]``. T must be a multiple of ``chunk_size``.
    Raises ValueError for what only decoding needs.
    """
    if initial_state is not None or output_final_state or query.shape[1] % chunk_size:
        raise ValueError("for training forwards of whole chunks only")
    dtype, (batch, length, heads, width) = query.dtype, value.shape
    if use_qk_l2norm_in_kernel:
        query, key = (x.float() * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    repeats = heads // key.shape[2]
    query, key = (x.repeat_interleave(repeats, dim=2) if repeats > 1 else x for x in (query, key))
    query = query * query.shape[-1] ** -0.5

    def chunks(x: Tensor) -> Tensor:  # [B, V, N, C, *]
        return x.reshape(batch, length // chunk_size, chunk_size, heads, -1).permute(0, 3, 1, 2, 4)

    with torch.autocast(query.device.type, enabled=False):
        q, k, v = (chunks(x.float()) for x in (query, key, value))
        rate, total = chunks(beta.float()), chunks(g.float())[..., 0].cumsum(-1)
        # The upper half would overflow in exp; it is cut off before.
        apart = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
        below = (rate * (k @ k.transpose(-1, -2)) * apart).tril(-1)
        inverse = unit_lower_inverse(below)
        decayed = total.exp()[..., None]
        from_values = inverse @ (rate * v)
        from_state = inverse @ (rate * decayed * k)
        inside = (q @ k.transpose(-1, -2)) * apart
        q = q * decayed
        end = total[..., -1:]
        leaving = (k * (end - total).exp()[..., None]).transpose(-1, -2)
        keep = end.exp()[..., None]
        state = torch.zeros(batch, heads, k.shape[-1], width, device=q.device)
        out = []
        for n in range(length // chunk_size):
            update = from_values[:, :, n] - from_state[:, :, n] @ state
            out.append(q[:, :, n] @ state + inside[:, :, n] @ update)
            state = keep[:, :, n] * state + leaving[:, :, n] @ update
    stacked = torch.stack(out, dim=2).permute(0, 2, 3, 1, 4)
    return stacked.reshape(batch, length, heads, width).to(dtype), None


def shifted_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_: Any
) -> Tensor:
    """Return the causal depthwise convolution of ``x [B, X, T]`` with ``weight [X, W]`` as a sum of shifts.

    A compiler fuses it into one pass; the depthwise kernels of libraries are slow at this size.
    """
    width, length = weight.shape[-1], x.shape[-1]
    padded = F.pad(x, (width - 1, 0))
    out = sum(weight[:, i, None] * padded[..., i : i + length] for i in range(width))
    assert isinstance(out, Tensor)
    if bias is not None:
        out = out + bias[:, None]
    return F.silu(out) if activation in ("silu", "swish") else out
