"""The drafter's shape, and the two ways to get one: from a target, or from a drafter directory's ``config.json``."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

from slipstream.config import DrafterSettings
from slipstream.drafter.schema import (
    FULL,
    SLIDING,
    either,
    integer,
    number,
    refuse_other_networks,
    required,
    rope_theta,
    section,
)
from slipstream.errors import DrafterError


class TargetShape(Protocol):
    """What ``resolve`` reads of a target; ``target.model.TargetInfo`` has it."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def vocab_rows(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def is_moe(self) -> bool: ...
    @property
    def rope_theta(self) -> float: ...
    @property
    def rms_norm_eps(self) -> float: ...
    @property
    def max_positions(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """Shape of a drafter; complete, so that nothing is derived later.

    ``hidden_size`` and ``vocab_size`` (embedding rows) are the target's, the rest is the drafter's own.
    ``target_layer_ids`` are 0-based target layers whose output is read. ``sliding_window`` is 0 when no layer slides;
    else a query at p of a sliding layer sees context j with p-j <= W-1 and its block causally.
    Raises DrafterError when the numbers do not fit together.
    """

    layers: int
    block_size: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    num_target_layers: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    layer_types: tuple[str, ...]
    sliding_window: int = 0
    attention_bias: bool = False

    def __post_init__(self) -> None:
        sizes = ("layers", "hidden_size", "intermediate_size", "heads", "kv_heads", "head_dim", "vocab_size")
        for name in sizes:
            if getattr(self, name) < 1:
                raise DrafterError(f"drafter {name} is {getattr(self, name)}; it must be at least 1")
        if self.block_size < 2:
            raise DrafterError(f"drafter block_size is {self.block_size}; an anchor and a mask need 2 or more")
        if self.heads % self.kv_heads:
            raise DrafterError(
                f"drafter heads {self.heads} is not a multiple of kv_heads {self.kv_heads}; "
                "set drafter.kv_heads to a divisor"
            )
        if self.head_dim % 2:
            raise DrafterError(f"drafter head_dim is {self.head_dim}; rotary positions need an even number")
        ids, last = self.target_layer_ids, self.num_target_layers - 2
        if not ids or ids[0] < 0 or ids[-1] > last or any(b <= a for a, b in pairwise(ids)):
            raise DrafterError(
                f"target_layer_ids {list(ids)} do not fit a target of {self.num_target_layers} layers; "
                f"give rising ids from 0 to {last}"
            )
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise DrafterError(
                f"mask_token_id {self.mask_token_id} is not a row of the target's embedding "
                f"(0 to {self.vocab_size - 1}); set drafter.mask_token_id to an unused row"
            )
        if len(self.layer_types) != self.layers or any(kind not in (FULL, SLIDING) for kind in self.layer_types):
            raise DrafterError(
                f"layer_types {list(self.layer_types)} does not give {FULL} or {SLIDING} "
                f"to each of {self.layers} layers"
            )
        if self.has_sliding and self.sliding_window < 1:
            raise DrafterError(
                f"sliding_window is {self.sliding_window}, but a layer is {SLIDING}; set drafter.sliding_window"
            )
        if not self.has_sliding and self.sliding_window:
            raise DrafterError(
                f"sliding_window is {self.sliding_window}, but no layer is {SLIDING}; "
                "set drafter.layer_types or leave the window 0"
            )
        if not self.rope_theta > 0 or not self.rms_norm_eps > 0:
            raise DrafterError(
                f"rope_theta {self.rope_theta} and rms_norm_eps {self.rms_norm_eps} must be above 0; give the target's"
            )

    @property
    def has_sliding(self) -> bool:
        """Whether any layer is sliding."""
        return SLIDING in self.layer_types

    @property
    def context_size(self) -> int:
        """Width of the context features, K*H."""
        return len(self.target_layer_ids) * self.hidden_size

    def window(self, layer: int) -> int:
        """Return the layer's sliding window; 0 for a full layer."""
        return self.sliding_window if self.layer_types[layer] == SLIDING else 0

    def to_json(self, dtype: str = "bfloat16") -> dict[str, Any]:
        """Return ``config.json`` in z-lab's layout, which SGLang, vLLM and z-lab's package read as it is.

        ``dtype`` names the dtype of the weights beside it. Block size and rotary base stand in both dialects, because
        each reader knows one of them only. There is no ``auto_map``: no code travels with the weights.
        """
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "block_size": self.block_size,
            "dflash_config": {
                "block_size": self.block_size,
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": list(self.target_layer_ids),
            },
            "num_target_layers": self.num_target_layers,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "max_position_embeddings": self.max_position_embeddings,
            "hidden_act": "silu",
            "attention_bias": self.attention_bias,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "tie_word_embeddings": False,
            "layer_types": list(self.layer_types),
            "sliding_window": self.sliding_window if self.has_sliding else None,
            "use_sliding_window": self.has_sliding,
            # Readers without layer_types slide from this layer on: L is none of them.
            "max_window_layers": self.layers,
            "dtype": dtype,
            "torch_dtype": dtype,
            "use_cache": True,
        }

    @classmethod
    def from_json(cls, tree: dict[str, Any]) -> DrafterConfig:
        """Read ``config.json`` in z-lab's layout, old (``block_size`` at the top) or new (inside ``dflash_config``).

        Raises DrafterError where a value is missing, given twice and different, or asks for another network: a guess
        would load cleanly and accept nothing.
        """
        nested = section(tree, "dflash_config")
        refuse_other_networks(tree, nested)
        layers = integer(tree, "num_hidden_layers")
        types = tree.get("layer_types")
        if types is None:
            if tree.get("use_sliding_window"):
                raise DrafterError("config has use_sliding_window but no layer_types; add a layer type for each layer")
            types = [FULL] * layers
        window = integer(tree, "sliding_window") if SLIDING in types and tree.get("sliding_window") is not None else 0
        return cls(
            layers=layers,
            block_size=either(nested, tree, "block_size"),
            target_layer_ids=tuple(either(nested, tree, "target_layer_ids")),
            mask_token_id=either(nested, tree, "mask_token_id"),
            num_target_layers=integer(tree, "num_target_layers"),
            hidden_size=integer(tree, "hidden_size"),
            intermediate_size=integer(tree, "intermediate_size"),
            heads=integer(tree, "num_attention_heads"),
            kv_heads=integer(tree, "num_key_value_heads"),
            head_dim=integer(tree, "head_dim"),
            vocab_size=integer(tree, "vocab_size"),
            rms_norm_eps=number(required(tree, "rms_norm_eps"), "rms_norm_eps"),
            rope_theta=rope_theta(tree),
            max_position_embeddings=integer(tree, "max_position_embeddings"),
            layer_types=tuple(types),
            sliding_window=window,
            attention_bias=bool(tree.get("attention_bias", False)),
        )


def spread_layer_ids(num_layers: int, count: int = 5) -> tuple[int, ...]:
    """Return ``count`` layer ids spread evenly from 1 to N-3 (z-lab's rule; halves round to even).

    Raises DrafterError when the target is too shallow for so many.
    """
    if count < 1:
        raise DrafterError(f"{count} layers cannot be read; read at least one")
    ids: tuple[int, ...] = (num_layers // 2,)
    if count > 1:
        ids = tuple(round(1 + i * (num_layers - 4) / (count - 1)) for i in range(count))
    if any(b <= a for a, b in pairwise(ids)) or ids[0] < 0 or ids[-1] > num_layers - 2:
        raise DrafterError(
            f"a target of {num_layers} layers is too shallow for {count} evenly spread target_layer_ids; "
            "set drafter.target_layer_ids"
        )
    return ids


def resolve(settings: DrafterSettings, info: TargetShape, mask_token_id: int) -> DrafterConfig:
    """Return the drafter's shape for a target: zeros and empty values of ``settings`` are the target's.

    A mixture-of-experts target has no dense MLP width to copy; its drafter gets 3 x hidden. Raises DrafterError.
    """
    width = 3 * info.hidden_size if info.is_moe else info.intermediate_size
    return DrafterConfig(
        layers=settings.layers,
        block_size=settings.block_size,
        target_layer_ids=tuple(settings.target_layer_ids) or spread_layer_ids(info.num_layers),
        mask_token_id=mask_token_id,
        num_target_layers=info.num_layers,
        hidden_size=info.hidden_size,
        intermediate_size=settings.intermediate_size or width,
        heads=settings.heads or info.heads,
        kv_heads=settings.kv_heads or info.kv_heads,
        head_dim=settings.head_dim or info.head_dim,
        vocab_size=info.vocab_rows,
        rms_norm_eps=info.rms_norm_eps,
        rope_theta=settings.rope_theta or info.rope_theta,
        max_position_embeddings=info.max_positions,
        layer_types=tuple(settings.layer_types) or (FULL,) * settings.layers,
        sliding_window=settings.sliding_window,
    )
