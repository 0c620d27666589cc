"""How vLLM and SGLang are told to serve a drafter, and what their loaders demand of its directory.

Both engines accept some wrong directories without a word, and then accept almost no draft. So their rules are asserted
here on ``config.json`` and the tensors' shapes, before anything is served. Sources: vLLM ``models/qwen3_dflash.py`` and
``eagle3_utils``; SGLang ``models/dflash.py`` and ``speculative/dflash_utils.py``.

Numbers: a block of B is an anchor and B-1 drafts. vLLM is told the drafts (B-1), SGLang the block (B).
All functions are pure and thread-safe.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.errors import ExportError

SLIDING = "sliding_attention"
LAYER_TYPES = ("full_attention", SLIDING)
Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class ServeCommands:
    """One shell line per engine."""

    vllm: str
    sglang: str


def serve_commands(config: Mapping[str, Any], *, target: str, drafter: str, hybrid: bool = False) -> ServeCommands:
    """Return the shell lines that serve ``target`` (a path or hub id) with the directory ``drafter``.

    ``config`` is the drafter's config.json. ``hybrid``: the target has recurrent layers, whose states SGLang then keeps
    in extra buffers to go back to. Mixed sliding and full layers need vLLM's second model runner, which is
    then asked for by name; full layers draft without a causal mask, hence the attention backend.
    """
    block = _block_size(config)
    speculative = json.dumps({"method": "dflash", "model": drafter, "num_speculative_tokens": block - 1})
    vllm = f"vllm serve {shlex.quote(target)} --speculative-config {shlex.quote(speculative)}"
    vllm = f"{vllm} --attention-backend flash_attn"
    if 0 < list(config.get("layer_types") or ()).count(SLIDING) < int(config["num_hidden_layers"]):
        vllm = f"VLLM_USE_V2_MODEL_RUNNER=1 {vllm}"
    sglang = (
        f"python -m sglang.launch_server --model-path {shlex.quote(target)} --speculative-algorithm DFLASH "
        f"--speculative-draft-model-path {shlex.quote(drafter)} --speculative-num-draft-tokens {block}"
    )
    if hybrid:
        sglang = f"{sglang} --mamba-scheduler-strategy extra_buffer"
    return ServeCommands(vllm=vllm, sglang=sglang)


def _block_size(config: Mapping[str, Any]) -> int:
    """Return the block size as SGLang reads it: nested first, then the top level. Raises ExportError without one."""
    value: Any = _dflash(config).get("block_size", config.get("block_size"))
    if not _is_int(value) or value < 2:
        raise ExportError(
            f"config.json has block_size {value!r}; write the trained block size, 2 or more, in both places"
        )
    return int(value)


def _dflash(config: Mapping[str, Any]) -> Mapping[str, Any]:
    nested = config.get("dflash_config")
    return nested if isinstance(nested, Mapping) else {}


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def engine_rules(config: Mapping[str, Any], shapes: Mapping[str, Shape]) -> list[str]:
    """Return every rule of an engine's loader that the directory breaks, each naming the engine; empty is good.

    ``config``: config.json; ``shapes``: tensor name to shape. Sizes are taken from the tensors, not from the config, so
    that the two check each other.
    """
    try:
        return [*_sglang_rules(config, shapes), *_vllm_rules(config, shapes)]
    except (KeyError, TypeError, ValueError) as error:
        return [f"config.json is incomplete: {type(error).__name__} {error}"]


def _ids(config: Mapping[str, Any]) -> list[int]:
    ids = _dflash(config).get("target_layer_ids")
    return [i for i in ids if _is_int(i)] if isinstance(ids, (list, tuple)) else []


def _sglang_rules(config: Mapping[str, Any], shapes: Mapping[str, Shape]) -> list[str]:
    faults: list[str] = []
    nested, ids = _dflash(config), _ids(config)
    layers, hidden = int(config["num_hidden_layers"]), int(config["hidden_size"])
    depth: Any = config.get("num_target_layers")
    if config.get("architectures") != ["DFlashDraftModel"]:
        faults.append(
            f"SGLang picks the class by architectures, which is {config.get('architectures')!r}, not "
            "['DFlashDraftModel']"
        )
    if not ids or len(ids) != len(nested.get("target_layer_ids") or ()):
        faults.append(
            "SGLang guesses the layers when dflash_config.target_layer_ids is absent or not a list of integers"
        )
    if not _is_int(depth):
        faults.append(f"SGLang takes the drafter's own depth for num_target_layers when it is {depth!r}")
    elif ids and not (min(ids) >= 0 and max(ids) <= int(depth) - 2):
        # The loader admits the last layer, but several of its models then fail to capture it.
        faults.append(f"SGLang captures layers 0 to {int(depth) - 2} of {depth}, target_layer_ids are {ids}")
    fc = shapes.get("fc.weight")
    if ids and fc != (hidden, len(ids) * hidden):
        faults.append(
            f"SGLang needs fc.weight of {(hidden, len(ids) * hidden)} for {len(ids)} layers of {hidden}, it is {fc}"
        )
    mask: Any = nested.get("mask_token_id")
    if not _is_int(mask) or not 0 <= mask < int(config["vocab_size"]):
        faults.append(f"SGLang falls back to a token named <|MASK|> when dflash_config.mask_token_id is {mask!r}")
    kinds = config.get("layer_types")
    if not isinstance(kinds, (list, tuple)) or len(kinds) != layers or any(k not in LAYER_TYPES for k in kinds):
        faults.append(f"SGLang needs one of {LAYER_TYPES} for each of {layers} layers, layer_types is {kinds!r}")
    elif SLIDING in kinds and not (_is_int(config.get("sliding_window")) and config["sliding_window"] > 0):
        faults.append(f"SGLang needs sliding_window for sliding layers, it is {config.get('sliding_window')!r}")
    if config.get("hidden_act") != "silu":
        faults.append(f"SGLang refuses hidden_act {config.get('hidden_act')!r}; the network is silu")
    if "rope_theta" not in config:
        faults.append("SGLang and z-lab's package read rope_theta, which is absent")
    strange = sorted(set(shapes) - set(expected_shapes(config))) if ids else []
    if strange:
        faults.append(f"SGLang ignores unknown tensors without a word: {strange[0]} ({len(strange)} such)")
    return faults


def _vllm_rules(config: Mapping[str, Any], shapes: Mapping[str, Shape]) -> list[str]:
    faults: list[str] = []
    nested, ids = _dflash(config), _ids(config)
    aux = config.get("eagle_aux_hidden_state_layer_ids")
    if aux is not None and list(aux) != [i + 1 for i in ids]:
        faults.append(
            f"vLLM takes eagle_aux_hidden_state_layer_ids {aux} as they are; they must be target_layer_ids + 1"
        )
    if not isinstance(config.get("rope_parameters"), Mapping) or "rope_theta" not in config["rope_parameters"]:
        faults.append("vLLM reads rope_parameters.rope_theta, which is absent: its default of 1000000 would be used")
    positions: Any = config.get("max_position_embeddings")
    if not _is_int(positions) or positions < 1:
        faults.append(
            f"vLLM sizes the drafter's rotary table, but max_position_embeddings is {positions!r}; give the target's"
        )
    if any(name.startswith("model.") for name in shapes):
        faults.append("vLLM adds the prefix model. itself; tensor names must not have it")
    own = sorted(name for name in shapes if name.startswith(("embed_tokens.", "lm_head.", "d2t", "t2d")))
    if own:
        faults.append(f"vLLM would use the drafter's own {own[0]} instead of the target's")
    if "causal" in nested or "use_swa" in nested:
        faults.append("vLLM lets dflash_config.causal and use_swa override layer_types; leave them out")
    if config.get("draft_vocab_size", config.get("vocab_size")) != config.get("vocab_size"):
        faults.append(
            f"vLLM maps a reduced vocabulary when draft_vocab_size is {config['draft_vocab_size']}; leave it out"
        )
    if "auto_map" in config:
        faults.append("auto_map names code that the directory does not ship; leave it out")
    return faults


def expected_shapes(config: Mapping[str, Any]) -> dict[str, Shape]:
    """Return the exact tensors of the network, from config.json: 11 for each layer (15 with biases) and three more."""
    h, inner, layers = int(config["hidden_size"]), int(config["intermediate_size"]), int(config["num_hidden_layers"])
    d, nq, nkv = int(config["head_dim"]), int(config["num_attention_heads"]), int(config["num_key_value_heads"])
    taps = len(_dflash(config)["target_layer_ids"])
    shapes: dict[str, Shape] = {"fc.weight": (h, taps * h), "hidden_norm.weight": (h,), "norm.weight": (h,)}
    for i in range(layers):
        own: dict[str, Shape] = {
            "input_layernorm": (h,),
            "self_attn.q_proj": (nq * d, h),
            "self_attn.k_proj": (nkv * d, h),
            "self_attn.v_proj": (nkv * d, h),
            "self_attn.o_proj": (h, nq * d),
            "self_attn.q_norm": (d,),
            "self_attn.k_norm": (d,),
            "post_attention_layernorm": (h,),
            "mlp.gate_proj": (inner, h),
            "mlp.up_proj": (inner, h),
            "mlp.down_proj": (h, inner),
        }
        shapes |= {f"layers.{i}.{name}.weight": shape for name, shape in own.items()}
        if config["attention_bias"]:
            shapes |= {
                f"layers.{i}.self_attn.{n}.bias": (own[f"self_attn.{n}"][0],)
                for n in ("q_proj", "k_proj", "v_proj", "o_proj")
            }
    return shapes


def engine_notes(config: Mapping[str, Any], *, scaled_embedding: bool = False, hybrid: bool = False) -> list[str]:
    """Return what a user should know before serving: facts about the engines that no loader checks.

    ``scaled_embedding``: the target's embedding module scales its rows (Gemma); ``hybrid``: it has recurrent layers.
    """
    notes: list[str] = []
    kinds = list(config.get("layer_types") or ())
    if SLIDING in kinds:
        window = config.get("sliding_window")
        notes.append(
            f"sliding layers: trained so that a query at p sees context j with p-j <= {int(window or 0) - 1} and "
            "its block "
            "causally, as SGLang and vLLM compute them; z-lab's own package passes the window to the attention "
            "kernel only "
            "(no mask without FlashAttention 2), so measure there before relying on it"
        )
        if kinds.count(SLIDING) < len(kinds):
            notes.append("mixed sliding and full layers: vLLM needs its V2 model runner (VLLM_USE_V2_MODEL_RUNNER=1)")
    if "full_attention" in kinds:
        notes.append(
            "full layers draft without a causal mask: vLLM needs an attention backend that allows it (flash_attn)"
        )
    if hybrid:
        notes.append("hybrid target: SGLang needs --mamba-scheduler-strategy extra_buffer, which its command gives")
    if scaled_embedding:
        notes.append(
            "the target scales its embedding; the drafter was trained on scaled rows, so compare the server's "
            "acceptance with evaluation.json"
        )
    notes.append(
        "rotary layout: the drafter is NeoX-style; vLLM copies the layout of the target, which fits unless the "
        "target interleaves"
    )
    return notes
