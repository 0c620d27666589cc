"""The model card: README.md of an exported directory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream.export.proof import Proof
    from slipstream.export.serving import ServeCommands
    from slipstream.target.model import Target


def measured_tau(evaluation: Mapping[str, Any]) -> float | None:
    """Return the acceptance length of evaluation.json; None where it holds no finite number."""
    tau = evaluation.get("tau")
    if isinstance(tau, bool) or not isinstance(tau, (int, float)) or not math.isfinite(tau):
        return None
    return float(tau)


def model_card(
    config: Mapping[str, Any],
    *,
    proof: Proof,
    commands: ServeCommands,
    notes: Sequence[str],
    facts: Mapping[str, Any],
    target: Target,
) -> str:
    """Return README.md: what the drafter is for, what was measured and proven, and how to serve it."""
    nested = config["dflash_config"]
    rows = [
        ("target", facts.get("target") or target.info.name),
        ("target digest", target.info.digest),
        ("training data key", facts.get("data_key") or "not recorded"),
        ("run", f"{facts.get('run_id', 'not recorded')}, step {facts.get('step', 'not recorded')}"),
        ("block size", f"{config['block_size']} (an anchor and {config['block_size'] - 1} drafts)"),
        ("target layers read", f"{nested['target_layer_ids']} (0-based outputs; vLLM counts them from 1)"),
        ("mask token", nested["mask_token_id"]),
        ("parameters", f"{proof.parameters:,} in {proof.dtype}; embedding and head are the target's"),
    ]
    evaluation = facts.get("evaluation") or {}
    if (tau := measured_tau(evaluation)) is not None:
        shown = f"{tau:.3f} tokens for each target pass, bonus token included"
        setting = f"{evaluation.get('prompts')} prompts, temperature {evaluation.get('temperature')}"
        rows.append(("acceptance length", f"{shown} ({setting}, block size {evaluation.get('block_size')})"))
    else:
        rows.append(("acceptance length", "not measured yet: slipstream evaluate RUN"))
    lines = ["# DFlash drafter", "", "| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows), ""]
    lines += ["## Serve", "", "```sh", commands.vllm, "", commands.sglang, "```", ""]
    lines += [f"- {note}" for note in notes]
    lines += [
        "",
        f"Read back from these files before they were published: {proof.tensors} tensors, and logits equal to the bit.",
    ]
    return "\n".join(lines) + "\n"
