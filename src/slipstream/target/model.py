"""The target: a frozen causal language model, its tokenizer, and the facts about it that the drafter needs."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.config import TargetConfig
from slipstream.errors import TargetError
from slipstream.target import families
from slipstream.target.digest import directory_digest
from slipstream.target.families import DecoderParts, locate_decoder, text_config
from slipstream.target.quiet import quiet_loading, without_kernel_advice
from slipstream.target.rules import settle_rules
from slipstream.target.source import (
    local_directory,
    read_config,
    read_model,
    read_tokenizer,
    resolve_dtype,
    resolve_path,
)

__all__ = ["Target", "TargetInfo", "load_target", "load_tokenizer", "resolve_dtype", "resolve_path"]


@dataclass(frozen=True)
class TargetInfo:
    """Facts about a target. ``vocab_rows`` counts embedding rows, which may exceed the tokenizer's entries.

    dtype is the loaded one, as torch names it without the prefix. eos_ids are all ids that end a generation, from the
    generation configuration, the model configuration and the tokenizer. digest identifies configuration and weights
    wherever they lie; it is empty where a hub id was described without its weights. logit_softcap: the target's logits
    are ``cap * tanh(raw / cap)``, which leaves argmax as it is. rope_theta and max_positions are 0 where the
    configuration names none (learned positions, ALiBi); rms_norm_eps is then 1e-6, the default of Qwen3 and Llama.
    """

    name: str
    model_type: str
    hidden_size: int
    num_layers: int
    vocab_rows: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    is_moe: bool
    is_hybrid: bool
    has_sliding: bool
    rope_theta: float
    rms_norm_eps: float
    max_positions: int
    tied: bool
    eos_ids: tuple[int, ...]
    pad_id: int | None
    dtype: str
    digest: str
    logit_softcap: float | None = None


class Target:
    """A frozen causal language model with its tokenizer. Not thread-safe: one per GPU thread.

    Built from a loaded model: puts it in eval mode, freezes it, and checks that it is causal, unless
    ``check_causal`` is false: the caller then calls ``assert_causal`` before any other forward. Raises TargetError
    where its parts cannot be found or do not fit.
    """

    def __init__(self, model: Any, tokenizer: Any, *, name: str, digest: str, check_causal: bool = True) -> None:
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.parts: DecoderParts = locate_decoder(model)
        weight = self.parts.embed_tokens.weight
        self.device: torch.device = weight.device
        self.dtype: torch.dtype = weight.dtype
        self.info: TargetInfo = describe(model, tokenizer, self.parts, name, digest)
        _check_fit(self)
        if check_causal:
            self.assert_causal()

    def assert_causal(self) -> None:
        """Run two short forwards; raise TargetError where states are not finite, or depend on later tokens."""
        _check_causal(self)

    def embed(self, ids: Tensor) -> Tensor:
        """Return the decoder's embedding module at ids ``int64 [...]``, its scaling included: ``[..., H]``."""
        embedded: Tensor = self.parts.embed_tokens(ids)
        return embedded

    @property
    def head_weight(self) -> Tensor:
        """The head's weight ``[V, H]``, through the target's own tying: for tied targets it is the embedding's."""
        return self.parts.lm_head.weight

    def head(self, hidden: Tensor) -> Tensor:
        """Return logits ``[..., V]``, scaled and capped as the target does, for states ``[..., H]`` after its norm."""
        config = text_config(self.model.config)
        logits: Tensor = self.parts.lm_head(hidden.to(self.parts.lm_head.weight.dtype))
        if (scale := getattr(config, "logit_scale", None)) is not None:  # Cohere
            logits = logits * scale
        if (divisor := getattr(config, "logits_scaling", None)) is not None:  # Granite
            logits = logits / divisor
        if (cap := self.info.logit_softcap) is not None:  # Gemma 2
            logits = torch.tanh(logits / cap) * cap
        return logits

    def ends_on(self, device: torch.device) -> Target:
        """Return a target with copies of embedding and head on ``device``, tied as they are, for a drafter there.

        Only ``embed``, ``head`` and ``head_weight`` may be used; its decoder is this one's, where it was.
        """
        embed, head = copy.deepcopy((self.parts.embed_tokens, self.parts.lm_head))
        ends = copy.copy(self)
        ends.parts = dataclasses.replace(self.parts, embed_tokens=embed.to(device), lm_head=head.to(device))
        ends.device = device
        return ends

    def close(self) -> None:
        """Let go of the weights; the target cannot be used afterwards."""
        self.model = self.parts = None  # type: ignore[assignment]
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def load_tokenizer(config: TargetConfig) -> Any:
    """Load the target's tokenizer alone. Raises TargetError where there is none."""
    return read_tokenizer(local_directory(config, weights=False), config)


def load_target(
    config: TargetConfig, *, device: torch.device, dtype: torch.dtype | None = None, check_causal: bool = True
) -> Target:
    """Load the target frozen and in eval mode on ``device``; ``dtype`` overrides the setting.

    ``check_causal``: see Target; without it no kernel is launched here. On a CPU its recurrent layers never run by
    another package's kernels (``rules``): where that makes a difference it is said on stderr.
    Thread-safe: loads are serialised. Raises TargetError for whatever cannot be a target: a missing path, no causal
    language model, missing or misshapen weights, no tokenizer, features that depend on later tokens.
    """
    if device.type == "cpu":
        without_kernel_advice()
    with quiet_loading():
        directory = local_directory(config)
        model_config = read_config(directory, config)
        tokenizer = read_tokenizer(directory, config)
        model = read_model(directory, config, model_config, device, dtype or resolve_dtype(config.dtype, device))
    packages = settle_rules(model)
    if packages and device.type == "cpu":
        print(
            f"target {config.path}: on a CPU its recurrent layers run by transformers' own code, not by the kernels of "
            f"{packages}",
            file=sys.stderr,
        )
    return Target(model, tokenizer, name=config.path, digest=directory_digest(directory), check_causal=check_causal)


def describe(model: Any, tokenizer: Any, parts: DecoderParts, name: str, digest: str) -> TargetInfo:
    """Collect a target's facts from its configuration and its modules, which may lie on the meta device."""
    config = text_config(model.config)
    hidden, heads = int(config.hidden_size), int(config.num_attention_heads)
    embedding, head = parts.embed_tokens.weight, parts.lm_head.weight
    eps = (
        getattr(config, field, None)
        for field in ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")
    )
    inner = getattr(config, "intermediate_size", None)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else getattr(config, "pad_token_id", None)
    return TargetInfo(
        name=name,
        model_type=str(config.model_type),
        hidden_size=hidden,
        num_layers=len(parts.layers),
        vocab_rows=int(embedding.shape[0]),
        heads=heads,
        kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(config, "head_dim", None) or hidden // heads),
        intermediate_size=inner if isinstance(inner, int) else max(inner) if inner else 4 * hidden,
        is_moe=families.is_moe(config),
        is_hybrid=families.is_hybrid(config),
        has_sliding=families.has_sliding(config),
        rope_theta=families.rope_theta(config),
        rms_norm_eps=next((float(value) for value in eps if value is not None), 1e-6),
        max_positions=families.max_positions(config),
        tied=head is embedding or (not head.is_meta and head.data_ptr() == embedding.data_ptr()),
        eos_ids=_eos_ids(name, model, config, tokenizer, int(embedding.shape[0])),
        pad_id=None if pad is None else int(pad),
        dtype=str(embedding.dtype).removeprefix("torch."),
        digest=digest,
        logit_softcap=getattr(config, "final_logit_softcapping", None),
    )


def _eos_ids(name: str, model: Any, config: Any, tokenizer: Any, vocab_rows: int) -> tuple[int, ...]:
    """Return every id that ends a generation, sorted; ids without an embedding row are left out."""
    found: set[int] = set()
    generation = getattr(model, "generation_config", None)
    for source, value in (
        ("generation_config.json", getattr(generation, "eos_token_id", None)),
        ("config.json", getattr(config, "eos_token_id", None)),
        ("tokenizer", tokenizer.eos_token_id),
    ):
        ids = value if isinstance(value, (list, tuple)) else [] if value is None else [value]
        if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
            raise TargetError(
                f"target {name}: in its {source}, eos_token_id is {str(value)[:80]!r}; make it a whole number or "
                "a list of them"
            )
        found.update(ids)
    return tuple(sorted(i for i in found if 0 <= i < vocab_rows))


def _check_fit(target: Target) -> None:
    """Refuse a target whose parts do not fit together."""
    info, head = target.info, target.parts.lm_head
    if head.weight.shape != (info.vocab_rows, info.hidden_size):
        raise TargetError(
            f"target {info.name}: its head's weight is {list(head.weight.shape)} but its embedding has "
            f"{info.vocab_rows} rows of {info.hidden_size}; a drafter cannot borrow both"
        )
    if getattr(head, "bias", None) is not None:
        raise TargetError(f"target {info.name}: its head has a bias, which the drafter's loss would ignore")
    check_tokenizer(info, target.tokenizer)


def _check_causal(target: Target) -> None:
    """Refuse a target whose states depend on later tokens."""
    info = target.info
    change = _change_from_later_tokens(target, tokenizer_entries(target.tokenizer))
    if math.isnan(change):
        cure = "set target.dtype to bfloat16 or float32" if target.dtype == torch.float16 else "its weights are damaged"
        raise TargetError(f"target {info.name}: its states are not finite in {info.dtype}; {cure}")
    if not change <= (1e-4 if target.dtype == torch.float32 else 2e-2):
        raise TargetError(
            f"target {info.name} is not causal: earlier states change by {change:.2g} of their size when later tokens "
            "change; give a decoder-only model"
        )


def check_tokenizer(info: TargetInfo, tokenizer: Any) -> int:
    """Return the tokenizer's entries. Raises TargetError where it has none, or more than the embedding has rows."""
    entries = tokenizer_entries(tokenizer)
    if entries == 0 or entries > info.vocab_rows:
        raise TargetError(
            f"target {info.name}: its tokenizer has {entries} ids for {info.vocab_rows} embedding rows; "
            "it is not this model's tokenizer"
        )
    return entries


def tokenizer_entries(tokenizer: Any) -> int:
    """Return the largest id of a tokenizer plus one; 0 for an empty one."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


@torch.no_grad()
def _change_from_later_tokens(target: Target, entries: int) -> float:
    """Return the largest relative change of the first 8 states when the 8 tokens after them change; nan: not finite."""
    ids = (torch.arange(16, device=target.device) * 7 + 3).remainder(entries)[None]
    other = torch.where(torch.arange(16, device=target.device) < 8, ids, (ids + 1).remainder(entries))
    # On a CPU, the advice to install GPU kernels helps nobody.
    with quiet_loading() if target.device.type == "cpu" else contextlib.nullcontext():
        states = [target.parts.decoder(input_ids=i, use_cache=False).last_hidden_state for i in (ids, other)]
    if not all(bool(torch.isfinite(state).all()) for state in states):
        return math.nan
    before, after = (state[:, :8].float() for state in states)
    return float(((before - after).norm(dim=-1) / before.norm(dim=-1).clamp_min(1e-12)).max())
