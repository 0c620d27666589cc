"""A Gated DeltaNet's forward over a few tokens from a known state, whose rollback costs next to nothing. CPU, float32.

The module's own PyTorch forward is made for long sequences: a convolution with as many groups as channels, heads that
are repeated in memory, two triangular solves, and the state after the whole block, of which most is then rolled back.
Here a block is one chunk, as in ``delta_rule``, whose formulas and letters these are::

    u_i + sum_{j<i} b_i exp(G_i - G_j) (k_i . k_j) u_j = b_i (v_i - exp(G_i) S^T k_i)
    o_i = (exp(G_i) S^T q_i + sum_{j<=i} exp(G_i - G_j) (q_i . k_j) u_j) / sqrt(D)

and the state S is left alone. What the block would add to it (k, u, G) is kept, and ``advance_blocks`` puts in as many
tokens as were accepted, one product a layer: nothing is saved before a pass, nothing is calculated twice after it.

Reference: the module's own forward, against which it proves itself before it is used (``short_states``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.decoding.delta_rule import EPS, is_gated_delta
from slipstream.decoding.packed import pack

_MANY, _LONGEST = 16, 8  # systems from which on, and length up to which, they are solved by products
_PROJECTIONS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")


@dataclass(slots=True)
class Pieces:
    """What a pass over Q tokens would change, float32.

    inputs ``[R, W + Q, X]``: the convolution's, the W before the block in front; keys ``[R, K, Q, D]``, normed; updates
    ``[R, V, Q, E]``: u; decays ``[R, V, Q]``: G, the sum of the decays up to each token.
    """

    inputs: Tensor
    keys: Tensor
    updates: Tensor
    decays: Tensor


def suits_short_block(module: Any) -> bool:
    """Return whether ``module`` is a Gated DeltaNet of the known parts, in float32 on the CPU."""
    if not is_gated_delta(module) or not all(hasattr(module, n) for n in (*_PROJECTIONS, "norm", "out_proj")):
        return False
    if not all(hasattr(module.norm, name) for name in ("weight", "variance_epsilon")):
        return False
    if any(getattr(module, name).bias is not None for name in _PROJECTIONS):
        return False
    return all(p.dtype == torch.float32 and p.device.type == "cpu" for p in module.parameters())


class ShortBlock:
    """One module's forward over few tokens. Weights are read when it is made, and must not change while it is used."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self._widths = [2 * module.key_dim + module.value_dim, module.value_dim, module.num_v_heads, module.num_v_heads]
        self._project = _product(torch.cat([getattr(module, name).weight.detach() for name in _PROJECTIONS]))
        # [W, X]: the channels of a token lie together, so the convolution is W products of whole rows.
        self._taps = module.conv1d.weight.detach().squeeze(1).t().contiguous()
        self._scale = -module.A_log.detach().exp()

    def forward(self, hidden: Tensor, conv_state: Tensor, state: Tensor) -> tuple[Tensor, Pieces]:
        """Return the module's output ``[R, Q, H]`` for ``hidden [R, Q, H]``, and the pieces. The states stay.

        conv_state ``[R, X, W]``, the newest token last; state ``[R, V, D, E]``; both float32.
        """
        one, (rows, length, _) = self.module, hidden.shape
        heads, share = one.num_k_heads, one.num_v_heads // one.num_k_heads
        mixed, gate, rate, step = self._project(hidden).split(self._widths, dim=-1)
        inputs = torch.cat((conv_state.transpose(1, 2), mixed), dim=1)
        out = inputs[:, 1 : 1 + length] * self._taps[0]
        for w in range(1, len(self._taps)):
            out.addcmul_(inputs[:, 1 + w : 1 + w + length], self._taps[w])
        if one.conv1d.bias is not None:
            out += one.conv1d.bias
        F.silu(out, inplace=True)

        pair = out[..., : 2 * one.key_dim].view(rows, length, 2, heads, one.head_k_dim)
        pair = pair * torch.rsqrt(pair.square().sum(-1, keepdim=True) + EPS)
        # Queries above keys in one matrix a key head: both are multiplied with the state, and both with the keys.
        both = pair.permute(0, 3, 2, 1, 4).reshape(rows, heads, 1, 2 * length, one.head_k_dim)
        keys = both[:, :, 0, length:]
        value = out[..., 2 * one.key_dim :].view(rows, length, heads, share, one.head_v_dim).permute(0, 2, 3, 1, 4)

        decays = (F.softplus(step + one.dt_bias) * self._scale).cumsum(dim=1).transpose(1, 2)
        total = decays.reshape(rows, heads, share, length, 1)
        rate = rate.sigmoid().transpose(1, 2).reshape(rows, heads, share, length, 1)
        decayed = total.exp()
        read = both @ state.view(rows, heads, share, one.head_k_dim, one.head_v_dim)
        # Above the diagonal exp takes minus infinity: the sums are positive there, and large ones would overflow.
        apart = (total - total.transpose(-1, -2)).masked_fill_(_later(length), -torch.inf).exp_()
        products = both @ keys[:, :, None].transpose(-1, -2)
        right = torch.addcmul(value, decayed, read[..., length:, :], value=-1).mul_(rate)
        updates = solve_unit_lower(products[..., length:, :] * apart * rate, right) if length > 1 else right
        core = decayed * read[..., :length, :] + (products[..., :length, :] * apart) @ updates
        core = (core * one.head_k_dim**-0.5).permute(0, 3, 1, 2, 4)
        core = F.rms_norm(core, core.shape[-1:], one.norm.weight, one.norm.variance_epsilon)
        core = core.reshape(rows, length, -1).mul_(F.silu(gate))
        output: Tensor = one.out_proj(core)
        return output, Pieces(inputs, keys, updates.flatten(1, 2), decays)


def solve_unit_lower(system: Tensor, right: Tensor) -> Tensor:
    """Return u of ``(I + L) u = right``, L what ``system [..., Q, Q]`` holds below the diagonal; right ``[..., Q, E]``.

    The library's solver takes the systems one by one, and with several threads pays for each. So many small ones are
    solved by products over all of them: ``(I - L) (I + L^2) (I + L^4) right``, where it ends. The terms grow with Q and
    cancel: where all keys of a block are alike, 4e-7 of the result is lost at Q = 8, but 7e-5 at 16.
    """
    length, width = right.shape[-2:]
    if length > _LONGEST or right.numel() < _MANY * length * width:
        solved: Tensor = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        return solved
    power = system.tril(-1).neg_().view(-1, length, length)
    found = right.reshape(-1, length, width)
    reach = 1
    while reach < length:
        if reach > 1:
            power = torch.bmm(power, power)
        found = torch.baddbmm(found, power, found)
        reach *= 2
    return found.view(right.shape)


def advance_blocks(pieces: Sequence[Pieces], states: Sequence[Tensor], counts: Sequence[int]) -> list[Tensor]:
    """Move each layer's ``states [R, V, D, E]`` in place over its pieces' first ``counts[r]`` tokens in row r.

    Returns the layers' convolution states ``[R, X, W]`` after them, as views. Counts are 0 .. Q, not all of them 0.
    """
    fewest, most = min(counts), max(counts)
    decays = torch.stack([p.decays[..., :most] for p in pieces])
    at = torch.tensor(counts)
    if fewest == most:
        end = decays[..., -1:]
        weights = (end - decays).exp()
    else:
        kept = torch.arange(most) < at[:, None, None]
        last = (at - 1).clamp(min=0)[:, None, None].expand(len(counts), decays.shape[2], 1)
        end = decays.gather(-1, last.expand(len(pieces), -1, -1, -1)) * (at > 0)[:, None, None]
        weights = torch.where(kept, end - decays, -torch.inf).exp()
    keep = end.exp()[..., None]
    width = pieces[0].inputs.shape[1] - pieces[0].decays.shape[-1]
    rows, tail = torch.arange(len(counts))[:, None], at[:, None] + torch.arange(width)
    conv = []
    for p, state, whole, share in zip(pieces, states, keep, weights, strict=True):
        heads = (*p.keys.shape[:2], -1)
        keys = (p.keys[:, :, None, :most] * share.view(*heads, most, 1)).flatten(0, 2)
        updates = p.updates[:, :, :most].flatten(0, 1)
        state.mul_(whole)
        if most == 1:  # one token is an outer product, at which a matrix product is slow
            state.flatten(0, 1).addcmul_(keys.transpose(1, 2), updates)
        else:
            state.flatten(0, 1).baddbmm_(keys.transpose(1, 2), updates)
        kept_inputs = p.inputs[:, most : most + width] if fewest == most else p.inputs[rows, tail]
        conv.append(kept_inputs.transpose(1, 2))
    return conv


@functools.lru_cache(maxsize=64)
def _later(length: int) -> Tensor:
    """Return the bool mask ``[length, length]`` that is True where the column comes after the row."""
    return torch.ones(length, length, dtype=torch.bool).triu(1)


def _product(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """Return the product with ``weight``, rearranged once where that is possible."""
    try:
        return pack(weight)
    except (AttributeError, RuntimeError):
        return lambda x: F.linear(x, weight)
