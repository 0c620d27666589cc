"""How values stand in z-lab's ``config.json``, in older and newer dialects, and which values are another network."""

from __future__ import annotations

import math
from typing import Any

from slipstream.errors import DrafterError

FULL = "full_attention"
SLIDING = "sliding_attention"

# Keys of ``dflash_config`` and of the top level that change what the network computes, with the values under which it
# is still the network of this package. Anything else would load, run, and be wrong.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "output_multiplier": (None, 1, 1.0),
    "input_embedding_scale": (None, 1, 1.0),
    "final_logit_softcapping": (None, 0, 0.0),
    "attention_sink_bias": (None, False),
    "attention_value_scale": (None, 1, 1.0),
    "sample_from_anchor": (None, False),
    "sliding_window_non_causal": (None, False),
    "shift_label": (None, False),
    "draft_vocab_size": (None,),
    "conv_kernel_size": (None,),
    "conv_group_size": (None,),
    "selector_rank": (None,),
    "selector_top_k": (None,),
    "projector_type": (None,),
}
_OWN_NESTED = {"mask_token_id", "target_layer_ids", "block_size", "causal", "use_swa", "swa_window_size"}


def required(tree: dict[str, Any], key: str) -> Any:
    """Return a value that must be there. Raises DrafterError."""
    if tree.get(key) is None:
        raise DrafterError(f"config has no {key}; add it: a guess would load cleanly and accept nothing")
    return tree[key]


def integer(tree: dict[str, Any], key: str) -> int:
    """Return a whole number that must be there. Raises DrafterError."""
    value = required(tree, key)
    if isinstance(value, bool) or not isinstance(value, int):
        raise DrafterError(f"config's {key} is {value!r}; it must be a whole number")
    return value


def number(value: Any, key: str) -> float:
    """Return a finite number. Raises DrafterError."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise DrafterError(f"config's {key} is {value!r}; it must be a number")
    return float(value)


def section(tree: dict[str, Any], key: str) -> dict[str, Any]:
    """Return an object that may be absent. Raises DrafterError for anything else under its name."""
    value = tree.get(key)
    if value is not None and not isinstance(value, dict):
        raise DrafterError(f"config's {key} is {value!r}; it must be an object")
    return value or {}


def either(nested: dict[str, Any], tree: dict[str, Any], key: str) -> Any:
    """Return a value that may stand inside ``dflash_config``, at the top, or in both (equal)."""
    inner, outer = nested.get(key), tree.get(key)
    if inner is not None and outer is not None and inner != outer:
        raise DrafterError(f"config has {key} {outer!r} at the top and {inner!r} in dflash_config; make them equal")
    value = required({key: inner if inner is not None else outer}, key)
    numbers = value if isinstance(value, list) else [value]
    if (key == "target_layer_ids") != isinstance(value, list) or any(type(number) is not int for number in numbers):
        kind = "a list of whole numbers" if key == "target_layer_ids" else "a whole number"
        raise DrafterError(f"config's {key} is {value!r}; it must be {kind}")
    return value


def rope_theta(tree: dict[str, Any]) -> float:
    """Return the rotary base of either dialect. Scaled, partial or multi-dimensional rotary is refused."""
    parameters, scaling = section(tree, "rope_parameters"), section(tree, "rope_scaling")
    for name, body in (("rope_parameters", parameters), ("rope_scaling", scaling)):
        kind = body.get("rope_type", body.get("type", "default"))
        extra = sorted(set(body) - {"rope_type", "type", "rope_theta"})
        if kind != "default" or extra:
            raise DrafterError(f"config's {name} is {body}; a drafter's rotary is plain, 1-D and over the full head")
    if tree.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise DrafterError(f"config's partial_rotary_factor is {tree['partial_rotary_factor']}; it must be 1")
    bodies = (tree, parameters, scaling)
    given = {number(body["rope_theta"], "rope_theta") for body in bodies if body.get("rope_theta") is not None}
    if len(given) > 1:
        raise DrafterError(f"config gives different rope_theta: {sorted(given)}; make them equal")
    if not given:
        required({}, "rope_theta")
    return given.pop()


def refuse_other_networks(tree: dict[str, Any], nested: dict[str, Any]) -> None:
    """Raise DrafterError for a key that changes the network or its masks."""
    types = tree.get("layer_types")
    if types is not None and not isinstance(types, list):
        raise DrafterError(f"config's layer_types is {types!r}; it must be a list, one for each layer")
    for key in sorted(set(nested) - _OWN_NESTED - set(_NEUTRAL)):
        raise DrafterError(
            f"dflash_config has {key} = {nested[key]!r}, which this network does not know; remove it if it is unused"
        )
    for key, neutral in _NEUTRAL.items():
        for body in (tree, nested):
            if body.get(key) not in neutral:
                raise DrafterError(f"config has {key} = {body[key]!r}: a variant of DFlash that is not this network")
    sliding = SLIDING in (types or ())
    full = FULL in (types or (FULL,))
    for key, value in (("is_causal", tree.get("is_causal")), ("dflash_config.causal", nested.get("causal"))):
        if (value is True and full) or (value is False and sliding):
            raise DrafterError(
                f"config has {key} = {value}; here full layers see their block both ways and sliding layers causally"
            )
    if tree.get("hidden_act", "silu") != "silu":
        raise DrafterError(f"config's hidden_act is {tree['hidden_act']!r}; the network has silu")
