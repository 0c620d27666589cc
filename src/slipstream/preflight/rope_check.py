"""``rope``: the drafter's rotary embedding is its own, plain and exact, in the network and on the disk."""

from __future__ import annotations

import copy
import json
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.drafter.model import DraftModel
from slipstream.drafter.store import read_config, save_drafter
from slipstream.errors import DrafterError
from slipstream.preflight.report import CheckFailure
from slipstream.preflight.subject import Subject, fresh_drafter, reduced_config

# Relative error of a rotated key. A frequency rounded to bfloat16 is off by 2^-9: radians at these positions.
_TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 5e-2}


def rope(subject: Subject) -> str:
    """The context's keys are rotated over the full head by theta ** (-2i/d) in float32, also in a bfloat16 copy."""
    run, config = subject.run, subject.run.config
    expected = run.recipe.drafter.rope_theta or run.target.info.rope_theta
    if config.rope_theta != expected:
        raise CheckFailure(f"the drafter's rope_theta is {config.rope_theta:g}, the recipe and target say {expected:g}")
    buffers = [name for name, _ in run.draft_model.named_buffers()]
    if buffers:
        raise CheckFailure(
            f"the drafter keeps the buffer {buffers[0]}; a cast of the module would round it, and loaders refuse it"
        )
    small = reduced_config(config, layers=1)
    furthest = max(min(config.max_position_embeddings, 4096), 64) - 1
    positions = torch.tensor([[0, 1, 2, 31, 32, furthest // 2, furthest - 1, furthest]], device=run.device)
    generator = torch.Generator("cpu").manual_seed(0)
    features = torch.randn(1, positions.shape[1], config.context_size, generator=generator).to(run.device)
    model = fresh_drafter(run, small).eval()
    for dtype in (torch.float32, torch.bfloat16):
        cast = copy.deepcopy(model).to(dtype)
        error = _key_error(cast, features.to(dtype), positions, expected)
        if not error <= _TOLERANCE[dtype]:
            raise CheckFailure(
                f"rotated keys of a {str(dtype).removeprefix('torch.')} drafter are off by {error:.2g} at "
                "positions up to "
                f"{furthest}: rotary must be plain, over all {config.head_dim} dimensions, with float32 "
                "frequencies of base "
                f"{expected:g}"
            )
    _check_relative(subject, model, features)
    _check_stored(model, expected)
    return (
        f"base {expected:g} over {config.head_dim} dimensions, keys exact to position {furthest} in float32 and "
        "bfloat16, stored in both dialects"
    )


@torch.no_grad()
def _key_error(model: DraftModel, features: Tensor, positions: Tensor, theta: float) -> float:
    """Compare ``context_kv``'s keys with keys that are rotated here, in float64, by the formula."""
    attention = model.layers[0].self_attn
    context = model.hidden_norm(model.fc(features))
    plain = F.linear(context, attention.k_proj.weight, attention.k_proj.bias)  # type: ignore[union-attr, arg-type]
    d = model.config.head_dim
    heads = attention.k_norm(plain.view(1, positions.shape[1], -1, d)).double().transpose(1, 2)  # type: ignore[operator, union-attr]
    frequencies = theta ** -(torch.arange(0, d, 2, device=features.device, dtype=torch.float64) / d)
    angles = positions[0, :, None].double() * frequencies
    first, second = heads[..., : d // 2], heads[..., d // 2 :]
    cos, sin = angles.cos(), angles.sin()
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    given = model.context_kv(features, positions)[0][0].double()
    return float(((given - rotated).norm(dim=-1) / rotated.norm(dim=-1).clamp_min(1e-12)).max())


@torch.no_grad()
def _check_relative(subject: Subject, model: DraftModel, features: Tensor) -> None:
    """Rotary is relative: moving context and block together changes nothing; moving one of them does."""
    run, block = subject.run, model.config.block_size
    tokens = features.shape[1]
    context = torch.arange(tokens, device=run.device)[None]
    ids = torch.full((1, block), model.config.mask_token_id, dtype=torch.long, device=run.device)
    ids[0, 0] = subject.documents[0].ids[-1]
    noise = run.target.embed(ids).float()

    def hidden(shift: int, apart: int) -> Tensor:
        at = context + shift
        positions = tokens + shift + apart + torch.arange(block, device=run.device)[None]
        return model.draft(noise, positions, model.context_kv(features, at), context_positions=at)

    here = hidden(0, 0)
    moved = float((hidden(17, 0) - here).abs().max())
    if not moved <= 1e-3 * float(here.abs().max()):
        raise CheckFailure(
            f"drafts change by {moved:.2g} when context and block move together; positions must count alike in both"
        )
    if model.config.window(0) == 0 and torch.equal(hidden(0, 9), here):
        raise CheckFailure("drafts do not change when the block moves away from its context; positions are not used")


def _check_stored(model: DraftModel, theta: float) -> None:
    """What is written is what was computed with, in both dialects, and reads back equal."""
    with tempfile.TemporaryDirectory(prefix="slipstream-preflight-") as room:
        directory = save_drafter(model, model.config, Path(room) / "drafter", dtype=torch.bfloat16)
        tree = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        stored = {
            "rope_theta": tree.get("rope_theta"),
            "rope_parameters": (tree.get("rope_parameters") or {}).get("rope_theta"),
        }
        for name, value in stored.items():
            if value != theta:
                raise CheckFailure(
                    f"config.json would say {name} {value!r}, the network computes with {theta:g}; servers would "
                    "use the former"
                )
        if tree.get("rope_scaling") is not None or tree.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise CheckFailure(f"config.json would scale or cut the rotary embedding: {tree.get('rope_scaling')!r}")
        try:
            back = read_config(directory)
        except DrafterError as error:
            raise CheckFailure(f"the stored drafter does not read back: {error}") from None
        if back != model.config:
            raise CheckFailure("the stored drafter reads back with another configuration than was trained")
