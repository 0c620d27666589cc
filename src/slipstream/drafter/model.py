"""The DFlash drafter: z-lab's network, with z-lab's parameter names.

::

    context = hidden_norm(fc(features))                     once, shared by all layers; it is never a query
    x       = the target's embedding of [anchor, mask, ...]
    layer:    y = input_layernorm(x);  q = q_norm(Wq y);  k = k_norm([Wk context | Wk y]);  v = [Wv context | Wv y]
              rotary on q and k;  x += Wo attention(q, k, v);  x += MLP(post_attention_layernorm(x))
    out     = norm(x)

11 tensors a layer and 3 more. Embedding and head are the target's: frozen, outside this module, not saved with it.
Source: arXiv 2602.06036 and the published z-lab checkpoints.

Precision: norms and rotary are computed in float32 and returned in the dtype of their input, whatever the dtype of the
weights; matrix products follow autocast, or the weights' dtype without it.

Letters: R rows, C context tokens, Q block tokens (N*B in training, B in decoding), K taps, H hidden size, d head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.drafter.attention import Attention, masked_attention
from slipstream.drafter.config import DrafterConfig
from slipstream.errors import DrafterError

ContextKV = list[tuple[Tensor, Tensor]]


class Projection(nn.Linear):
    """A linear layer whose first weights come from ``DraftModel.init_weights``, not from the global generator."""

    def reset_parameters(self) -> None:
        """Do nothing."""

    def forward(self, input: Tensor) -> Tensor:
        """Multiply; without autocast the input takes the weights' dtype."""
        if not torch.is_autocast_enabled(input.device.type):
            input = input.to(self.weight.dtype)
        return F.linear(input, self.weight, self.bias)


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, in float32, returned in the input's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return the normed x; the gradient reaches ``weight`` in float32 under autocast too."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (self.weight.float() * wide).to(x.dtype)


def rotary_tables(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Return float32 (cos, sin) [R, 1, T, d/2] of positions [R, T]: frequency i is theta ** (-2i/d).

    Computed from the config at each call and kept nowhere, so that no cast of the module can round a frequency.
    """
    steps = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32)
    frequencies = 1.0 / theta ** (steps / head_dim)
    angles = positions[:, None, :, None].float() * frequencies
    return angles.cos(), angles.sin()


def rotate(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate x [R, heads, T, d] in float32, pairing element i with i + d/2; the dtype is kept."""
    cos, sin = tables
    first, second = x.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


class DraftAttention(nn.Module):
    """Queries from the block tokens; keys and values from context and block tokens, through the same projections."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        hidden, d, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.head_dim = d
        self.q_proj = Projection(hidden, config.heads * d, bias=bias)
        self.k_proj = Projection(hidden, config.kv_heads * d, bias=bias)
        self.v_proj = Projection(hidden, config.kv_heads * d, bias=bias)
        self.o_proj = Projection(config.heads * d, hidden, bias=bias)
        self.q_norm = RMSNorm(d, config.rms_norm_eps)
        self.k_norm = RMSNorm(d, config.rms_norm_eps)

    def _heads(self, x: Tensor) -> Tensor:
        """[R, T, heads*d] -> [R, T, heads, d]."""
        heads: Tensor = x.unflatten(-1, (x.shape[-1] // self.head_dim, self.head_dim))
        return heads

    def keys_values(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return rotated keys and values [R, kv_heads, T, d] of x [R, T, H] (context, or normed block tokens)."""
        k = self.k_norm(self._heads(self.k_proj(x))).transpose(1, 2)
        v = self._heads(self.v_proj(x)).transpose(1, 2)
        return rotate(k, tables), v

    def forward(
        self, layer: int, x: Tensor, context: tuple[Tensor, Tensor], tables: tuple[Tensor, Tensor], attention: Attention
    ) -> Tensor:
        """Return [R, Q, H] for normed block tokens x [R, Q, H] and the context's keys and values."""
        q = rotate(self.q_norm(self._heads(self.q_proj(x))).transpose(1, 2), tables)
        k, v = self.keys_values(x, tables)
        # A cached context may have another dtype than this call computes in.
        k = torch.cat((context[0].to(k.dtype), k), 2)
        v = torch.cat((context[1].to(v.dtype), v), 2)
        out = attention(layer, q, k, v)
        projected: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return projected


class DraftMLP(nn.Module):
    """SiLU-gated MLP."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = Projection(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = Projection(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = Projection(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[R, Q, H] -> [R, Q, H]."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class DraftLayer(nn.Module):
    """One decoder layer. The context passes its projections but not its norms."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.self_attn = DraftAttention(config)
        self.mlp = DraftMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, layer: int, x: Tensor, context: tuple[Tensor, Tensor], tables: tuple[Tensor, Tensor], attention: Attention
    ) -> Tensor:
        """[R, Q, H] -> [R, Q, H]; the residual keeps the dtype of x."""
        attended: Tensor = self.self_attn(layer, self.input_layernorm(x), context, tables, attention)
        x = x + attended.to(x.dtype)
        mixed: Tensor = self.mlp(self.post_attention_layernorm(x))
        return x + mixed.to(x.dtype)


class DraftModel(nn.Module):
    """The drafter. One per GPU thread.

    A new one has weights of standard deviation 0.02 from seed 0, unless it is built under ``torch.device("meta")``.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.fc = Projection(config.context_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if not self.fc.weight.is_meta:
            self.init_weights(0.02, torch.Generator().manual_seed(0))

    @torch.no_grad()
    def init_weights(self, std: float, generator: torch.Generator) -> None:
        """Set matrices to normal(0, std), norms to 1, biases to 0.

        ``generator`` is a CPU generator: the draws are made there, in the order of the state dict, so that every
        device gets the same weights.
        """
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2:
                draw = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
                parameter.copy_(draw.normal_(0.0, std, generator=generator))
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)

    def _tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return rotary_tables(positions, self.config.head_dim, self.config.rope_theta)

    def context_kv(self, features: Tensor, positions: Tensor) -> ContextKV:
        """Return each layer's context keys and values [R, kv_heads, T, d], keys rotated.

        features [R, T, K*H]; positions int64 [R, T], absolute in the document. They do not depend on the block, so a
        decoder keeps them and appends those of new tokens.
        """
        context = self.hidden_norm(self.fc(features))
        tables = self._tables(positions)
        return [layer.self_attn.keys_values(context, tables) for layer in self.layers]  # type: ignore[operator, union-attr]

    def _blocks(self, noise: Tensor, positions: Tensor, context: ContextKV, attention: Attention) -> Tensor:
        tables = self._tables(positions)
        x = noise
        for index, layer in enumerate(self.layers):
            x = layer(index, x, context[index], tables, attention)
        normed: Tensor = self.norm(x)
        return normed

    def forward(
        self,
        features: Tensor,
        noise: Tensor,
        context_positions: Tensor,
        block_positions: Tensor,
        attention: Attention,
    ) -> Tensor:
        """Return hidden states [R, Q, H], after the final norm, of all blocks of all rows at once.

        features [R, C, K*H]; noise [R, Q, H]: the target's embedding of [anchor, mask, ...] per block;
        context_positions int64 [R, C], block_positions int64 [R, Q], both counted within the document.
        ``attention`` holds the mask. No host sync, no data-dependent shape or branch.
        """
        return self._blocks(noise, block_positions, self.context_kv(features, context_positions), attention)

    def draft(
        self,
        noise: Tensor,
        block_positions: Tensor,
        context_kv: Sequence[tuple[Tensor, Tensor]],
        *,
        context_mask: Tensor | None = None,
        context_positions: Tensor | None = None,
    ) -> Tensor:
        """Return hidden states [R, B, H], after the final norm, of one block per row: the decoding layout.

        noise [R, B, H]; block_positions int64 [R, B]; context_kv from ``context_kv`` (T tokens: those committed before
        the anchor, and no other); context_mask bool [R, 1, 1 or B, T] is False where a row's context is padding (None:
        all are real); context_positions int64 [R, T] is needed when the drafter has sliding layers.
        Raises DrafterError when it is needed and absent.
        """
        config = self.config
        rows, queries = noise.shape[:2]
        length = context_kv[0][0].shape[2]
        if config.has_sliding and context_positions is None:
            raise DrafterError("this drafter has sliding layers; pass context_positions to draft()")

        def mask_for(window: int) -> Tensor | None:
            if not window and context_mask is None:
                return None
            seen = torch.ones(rows, 1, queries, length, dtype=torch.bool, device=noise.device)
            own = torch.ones(rows, 1, queries, queries, dtype=torch.bool, device=noise.device)
            if context_mask is not None:
                seen = seen & context_mask
            if window and context_positions is not None:
                distance = block_positions[:, None, :, None] - context_positions[:, None, None, :]
                seen = seen & (distance < window)
                own = own.tril()
            return torch.cat((seen, own), -1)

        masks = {window: mask_for(window) for window in sorted({config.window(i) for i in range(config.layers)})}

        def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return masked_attention(q, k, v, masks[config.window(layer)])

        return self._blocks(noise, block_positions, list(context_kv), attention)
