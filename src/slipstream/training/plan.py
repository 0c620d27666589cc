"""``--dry-run``: what a recipe resolves to, and how large it is. The target's weights are not loaded."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any

import torch

from slipstream.config import Recipe, TrainingConfig
from slipstream.data.pack import build_dataset
from slipstream.drafter.config import DrafterConfig
from slipstream.drafter.store import parameter_shapes
from slipstream.target.description import describe_target
from slipstream.target.features import validate_layer_ids
from slipstream.target.model import TargetInfo
from slipstream.target.source import resolve_dtype
from slipstream.training.hardware import resolve_attention, resolve_device, resolve_precision
from slipstream.training.heldout import heldout_prompts, overlap
from slipstream.training.muon import orthogonalisation_flops
from slipstream.training.optimizer import state_bytes
from slipstream.training.session import resolve_anchors, resolve_drafter, resolve_steps
from slipstream.training.step import resolve_step_settings

GIB = 2**30


@dataclass(frozen=True)
class _Described:
    """Tokenizer and description of a target whose weights are not loaded."""

    tokenizer: Any
    info: TargetInfo


def plan(recipe: Recipe) -> dict[str, Any]:
    """Return the resolved plan by name, for printing: device, dtypes, target, drafter, rows, steps, sizes, memory.

    Reads the target's configuration and tokenizer (of a hub id, downloads nothing else), and packs the data (cached).
    Raises what ``train`` would raise for the same recipe before it loads weights.
    """
    training = recipe.training
    device = resolve_device(recipe.run.device)
    precision = resolve_precision(training.precision, device)
    kind = resolve_attention(training.attention, device)
    target_dtype = resolve_dtype(recipe.target.dtype, device)
    info, tokenizer, target_parameters = describe_target(recipe.target)
    dataset = build_dataset(recipe.data, tokenizer, stop_ids=info.eos_ids)
    training = resolve_anchors(training, dataset.row_length)
    config = resolve_drafter(recipe, tokenizer, info, dataset.used_ids)
    validate_layer_ids(config.target_layer_ids, info.num_layers)
    settings = resolve_step_settings(
        training, block_size=config.block_size, vocab_rows=config.vocab_size, precision=precision
    )
    shapes = list(parameter_shapes(config).values())
    parameters = sum(map(math.prod, shapes))
    steps = resolve_steps(training, len(dataset))
    prompts = heldout_prompts(recipe, _Described(tokenizer, info))
    report = dataset.report
    memory = memory_estimate(
        training,
        config,
        row_length=dataset.row_length,
        weight_bytes=8 * parameters + state_bytes(shapes, training),
        target_bytes=target_parameters * target_dtype.itemsize,
        feature_bytes=target_dtype.itemsize,
        compute_bytes=precision.itemsize,
        chunk=settings.chunk,
        dense=kind == "dense",
    )
    exists = os.path.exists(recipe.run.directory)  # False, not an error, for a name that no disk takes
    out: dict[str, Any] = {
        "run directory": f"{recipe.run.directory} ({'exists: --resume or another name' if exists else 'new'})",
        "device": str(device),
        "drafter computes in": f"{_name(precision)}, weights and optimizer state float32",
        "attention": kind,
        "target": f"{info.name} ({info.model_type}, {info.num_layers} layers, hidden {info.hidden_size}, "
        f"{info.vocab_rows} embedding rows, {target_parameters:,} parameters)",
        "target dtype": _name(target_dtype),
        "target digest": info.digest[:16] or "known once the weights are downloaded",
        "target layers read": list(config.target_layer_ids),
        "mask token": f"{config.mask_token_id} "
        f"({tokenizer.convert_ids_to_tokens(config.mask_token_id) or 'a row past the tokenizer'})",
        "drafter": f"{config.layers} layers, block {config.block_size}, {config.heads} heads of {config.head_dim} "
        f"({config.kv_heads} for keys), MLP {config.intermediate_size}, {', '.join(sorted(set(config.layer_types)))}",
        "drafter parameters": f"{parameters:,}",
        "loss": f"{settings.loss}" + (f", gamma {settings.gamma:g}" if settings.loss == "decay" else ""),
        "labels": _labels(training),
        "rows": f"{len(dataset):,} of {dataset.row_length:,} tokens ({report.tokens:,} tokens, "
        f"{report.supervised_share:.1%} supervised)",
        "step": f"{training.accumulation} x {training.rows} rows, {training.draws_per_prefill} draws of up to "
        f"{training.anchors} anchors a row",
        "tokens per step": f"up to {training.accumulation * training.rows * dataset.row_length:,}",
        "steps": "until the time is used up" if steps is None else f"{steps:,}",
        "optimizer": _optimizer(training, shapes),
        "schedule": f"{training.schedule}, warm-up {training.warmup_ratio:.0%}",
    }
    out["held-out prompts"] = f"{len(prompts):,} decoded while training" if prompts else "none decoded while training"
    if (warning := overlap(recipe.data, tokenizer, info, dataset)) is not None:
        out["warning"] = warning.removeprefix("warning: ")
    if training.max_minutes > 0:
        out["time limit"] = f"{training.max_minutes:g} minutes"
    for name, size in memory.items():
        out[f"memory: {name}"] = f"{size / GIB:.2f} GiB"
    out["memory: together"] = f"{sum(memory.values()) / GIB:.2f} GiB (estimate)"
    return out


def _labels(training: TrainingConfig) -> str:
    if training.labels == "hard":
        return "hard: the data's tokens"
    rest = f", {training.soft_share:.0%}, beside the data's tokens" if training.soft_share < 1 else ""
    return f"soft: the target's distribution{rest}"


def _optimizer(training: TrainingConfig, shapes: list[tuple[int, ...]]) -> str:
    peak = f"peak {training.learning_rate:g}"
    if training.optimizer == "adamw":
        return f"adamw, {peak}"
    # Told because it is as much for a small step as for a large one.
    cost = f"{orthogonalisation_flops(shapes) / 1e12:.3g} TFLOP a step"
    return f"muon for matrices, peak {training.muon_learning_rate:g}, {cost}; adamw for norms, {peak}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def memory_estimate(
    training: TrainingConfig,
    config: DrafterConfig,
    *,
    row_length: int,
    weight_bytes: int,
    target_bytes: int,
    feature_bytes: int,
    compute_bytes: int,
    chunk: int,
    dense: bool,
) -> dict[str, int]:
    """Return bytes by use, at the worst micro-batch: every row full, every anchor taken.

    ``weight_bytes``: the drafter's weights, gradients and optimizer state, float32: 16 bytes a parameter with AdamW, 12
    for a matrix with Muon.
    Activations are those that autograd keeps for the drafter's blocks and context; the target's own peak is a few
    layers' worth and is not counted, nor what an update needs when they are gone. The estimate leaves out the
    allocator's slack.
    """
    rows, hidden = training.rows, config.hidden_size
    context = rows * row_length
    queries = rows * training.anchors * config.block_size
    soft = training.labels == "soft"
    key_width = config.kv_heads * config.head_dim
    # A layer keeps, per block token: what norms take and give, q, k, v, attended values, three MLP widths.
    per_query = 6 * hidden + 3 * config.heads * config.head_dim + 2 * key_width + 3 * config.intermediate_size
    activations = config.layers * (queries * per_query + context * 2 * key_width) + 3 * context * hidden
    sizes = {
        "target weights": target_bytes,
        "drafter weights, gradients, moments": weight_bytes,
        "context features": context * (config.context_size + soft * hidden) * feature_bytes,
        "activations": activations * (compute_bytes + 2),
        "logits": min(chunk, rows * training.anchors * (config.block_size - 1)) * config.vocab_size * 4 * (2 + soft),
    }
    if dense:
        blocks = training.anchors * config.block_size
        sizes["dense attention"] = rows * blocks * (row_length + blocks) * (1 + 4 * config.heads)
    return sizes
