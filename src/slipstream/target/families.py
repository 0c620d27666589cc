"""Where the parts of a causal language model are, whatever the family calls them.

The search is structural: the decoder is the module that holds a ``ModuleList`` with as many entries as the text
configuration has layers, together with the model's own input embedding. That finds plain decoders and the text model
inside a multimodal class alike, and needs no list of model types.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import nn

from slipstream.errors import TargetError

_NORM_NAMES = ("norm", "final_layernorm", "final_layer_norm", "final_norm", "ln_f", "norm_f")
_EXPERT_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_ATTENTION_KINDS = ("full_attention", "sliding_attention", "chunked_attention", "attention")


@dataclass(frozen=True)
class DecoderParts:
    """The modules of a target that Slipstream calls or hooks. They are the model's own; nothing is copied.
    Embedding and head may be the family's own classes: a scaled embedding, a parallel linear.

    decoder: takes ``input_ids`` and runs embedding, layers and final norm; layers: its decoder layers in order;
    embed_tokens: ids to the decoder's input, scaling included; norm: the final norm; lm_head: hidden to logits.
    """

    decoder: nn.Module
    layers: nn.ModuleList
    embed_tokens: nn.Embedding
    norm: nn.Module
    lm_head: nn.Linear


def text_config(model_config: Any) -> Any:
    """Return the configuration of the text decoder, which in a multimodal configuration is nested."""
    return model_config.get_text_config(decoder=True)


def locate_decoder(model: Any) -> DecoderParts:
    """Find decoder, layers, embedding, final norm and head. Raises TargetError naming the part that is missing."""
    name = type(model).__name__
    count = getattr(text_config(model.config), "num_hidden_layers", None)
    if not isinstance(count, int) or count < 1:
        raise TargetError(
            f"{name} has num_hidden_layers {count!r}; a causal language model with decoder layers is needed"
        )
    embedding = _call(model, "get_input_embeddings")
    head = _call(model, "get_output_embeddings")
    if not isinstance(getattr(embedding, "weight", None), nn.Parameter):
        raise TargetError(f"{name} has no input embedding; a causal language model is needed")
    if not isinstance(getattr(head, "weight", None), nn.Parameter):
        raise TargetError(f"{name} has no language-model head; load a causal language model, not a bare decoder")
    for decoder in model.modules():
        layers = _layer_list(decoder, count)
        if layers is None or not any(module is embedding for module in decoder.modules()):
            continue
        norms = [m for m in (getattr(decoder, n, None) for n in _NORM_NAMES) if isinstance(m, nn.Module)]
        if not norms:
            raise TargetError(f"{name}: its decoder {type(decoder).__name__} has no final norm under a known name")
        return DecoderParts(decoder=decoder, layers=layers, embed_tokens=embedding, norm=norms[0], lm_head=head)
    raise TargetError(
        f"{name}: no module holds {count} decoder layers beside the input embedding; this family is not supported"
    )


def _layer_list(module: nn.Module, count: int) -> nn.ModuleList | None:
    """Return the direct child that lists ``count`` layers, or None."""
    for child in module.children():
        if isinstance(child, nn.ModuleList) and len(child) == count:
            return child
    return None


def _call(model: Any, method: str) -> Any:
    """Return ``model.method()``; None where the class does not implement it."""
    try:
        return getattr(model, method)()
    except (AttributeError, NotImplementedError):
        return None


def layer_kinds(config: Any) -> tuple[str, ...]:
    """Return the kind of each layer as the configuration writes it; empty where it has no such list."""
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    return tuple(str(kind) for kind in kinds)


def is_hybrid(config: Any) -> bool:
    """Return whether some layers carry a recurrent or convolutional state instead of keys and values."""
    return not all(_is_attention(kind) for kind in layer_kinds(config))


def _is_attention(kind: str) -> bool:
    """Return whether a layer of this kind has keys and values only."""
    return kind in _ATTENTION_KINDS


def recurrent_modules(parts: DecoderParts, config: Any) -> tuple[nn.Module, ...]:
    """Return the modules that carry a recurrent or convolutional state (``linear_attn`` of Qwen3.5), layer by layer.

    They are those children of such a layer that have a convolution over tokens or a decay; where none is found, the
    layer gives none.
    """
    layers = [layer for layer, kind in zip(parts.layers, layer_kinds(config), strict=False) if not _is_attention(kind)]
    return tuple(
        child
        for layer in layers
        for child in layer.children()
        if hasattr(child, "A_log") or any(isinstance(module, nn.Conv1d) for module in child.modules())
    )


def is_moe(config: Any) -> bool:
    """Return whether the feed-forward layers route tokens to experts."""
    return any((getattr(config, name, None) or 0) > 1 for name in _EXPERT_FIELDS)


def has_sliding(config: Any) -> bool:
    """Return whether any layer attends within a window only."""
    if kinds := layer_kinds(config):
        return "sliding_attention" in kinds
    window = getattr(config, "sliding_window", None)
    return window is not None and getattr(config, "use_sliding_window", True) is not False


def has_chunks(config: Any) -> bool:
    """Return whether any layer attends within fixed chunks of absolute positions."""
    return "chunked_attention" in layer_kinds(config) or getattr(config, "attention_chunk_size", None) is not None


def rope_theta(config: Any) -> float:
    """Return the rotary base of the full-attention layers; 0.0 where the configuration names none, or several.

    transformers writes ``rope_parameters`` flat, or one dictionary per layer kind, and fills in the default of the
    model's class; older files have ``rope_theta``. Raises TargetError for what is no base.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    if isinstance(rope.get("full_attention"), dict):
        rope = rope["full_attention"]
    elif kinds := [kind for kind in rope.values() if isinstance(kind, dict)]:
        bases = {kind.get("rope_theta") for kind in kinds}
        rope = kinds[0] if len(bases) == 1 else {}
    value = rope.get("rope_theta") or getattr(config, "rope_theta", None)
    return _number(value, "rope_theta", "the base that the target was trained with")


def max_positions(config: Any) -> int:
    """Return the longest sequence of the target, in tokens; 0 where its configuration names none.

    Raises TargetError for what is no length.
    """
    value = getattr(config, "max_position_embeddings", None)
    return int(_number(value, "max_position_embeddings", "the longest sequence that the target was trained for"))


def _number(value: Any, name: str, meaning: str) -> float:
    """Return a positive number of a configuration; 0.0 for None and 0, which transformers writes for none."""
    if value is None or (value == 0 and value is not False):
        return 0.0
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise TargetError(f"the target's {name} is {str(value)[:40]!r}; write {meaning} into its config.json")
    return float(value)
