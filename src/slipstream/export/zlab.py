"""One directory that z-lab's package, SGLang and vLLM load, written aside, proven, and only then given its name.

::

    DIR/
        model.safetensors   the network's tensors and nothing else, bfloat16 (float16 for a float16 target)
        config.json         z-lab's keys; block size in both places, both rotary dialects
        README.md           what it was trained for, what was measured, and the serve commands

A kill, a full disk or a failed proof leaves no directory under the name; an existing one is never written to.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.data.reason import one_line
from slipstream.errors import ExportError, SlipstreamError
from slipstream.export.card import measured_tau, model_card
from slipstream.export.serving import ServeCommands, engine_notes, serve_commands

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from slipstream.drafter.config import DrafterConfig
    from slipstream.drafter.model import DraftModel
    from slipstream.export.proof import Proof
    from slipstream.target.model import Target

# Context features of these tokens stand in the proof; any text does, since nothing about it is measured.
PROOF_TEXT = "The proof of the pudding is in the eating: read the files back, and compare every logit.\n" * 2


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    """Where the directory is, what was proven about it, and how it is served."""

    directory: Path
    proof: Proof
    commands: ServeCommands
    notes: tuple[str, ...]


def export_run(
    run_dir: Path, to_dir: Path, overrides: Sequence[str] = (), *, dry_run: bool = False, console: Console | None = None
) -> ExportReport | None:
    """Export the drafter of a run to the new directory ``to_dir`` and print the serve commands.

    Reads ``run_dir/drafter`` (an unfinished run: its newest complete checkpoint) and the run's recipe, to which
    ``overrides`` apply (``--target.path`` where the target has moved). Returns None for a dry run, which writes
    nothing. Raises ExportError for a directory that is no run, an existing ``to_dir``, a target other than the trained
    one, a full disk, or any part of the proof.
    """
    from slipstream.drafter.store import load_drafter
    from slipstream.recipe import load_recipe
    from slipstream.target.description import target_is_hybrid
    from slipstream.target.model import load_target
    from slipstream.training.hardware import resolve_device

    if not (run_dir / "recipe.toml").is_file():
        raise ExportError(
            f"{run_dir} is not a run directory (it has no recipe.toml); give the run.directory of a training run"
        )
    recipe = load_recipe(run_dir / "recipe.toml", overrides)
    source = drafter_of_run(run_dir)
    _refuse_existing(to_dir)
    import torch

    draft_model, config = load_drafter(source, device=torch.device("cpu"), dtype=torch.float32)
    if dry_run:
        written = config.to_json()
        commands = serve_commands(
            written, target=recipe.target.path, drafter=str(to_dir), hybrid=target_is_hybrid(recipe.target)
        )
        _say(
            console,
            f"would export {source} to {to_dir}: block size {config.block_size}, layers "
            f"{list(config.target_layer_ids)}",
        )
        _say(console, commands.vllm)
        _say(console, commands.sglang)
        return None
    target = load_target(recipe.target, device=resolve_device(recipe.run.device))
    try:
        report = export_drafter(
            draft_model,
            config,
            to_dir,
            target=target,
            run=run_facts(run_dir, source),
            serve_as=served_path(recipe.target.path, target),
        )
    finally:
        target.close()
    proof = report.proof
    _say(
        console,
        f"exported {source} to {to_dir}: {proof.tensors} tensors, {proof.parameters:,} parameters, {proof.dtype}",
    )
    _say(
        console,
        f"proven: keys, shapes, configuration, engine rules; {proof.slots} slots of logits on {proof.positions} "
        "tokens of the "
        f"target equal to the bit (against float32 weights: {proof.same_drafts:.0%} of drafts the same)",
    )
    for note in report.notes:
        _say(console, f"note: {note}")
    _say(console, "serve with vLLM:")
    _say(console, f"  {report.commands.vllm}")
    _say(console, "serve with SGLang:")
    _say(console, f"  {report.commands.sglang}")
    return report


def export_drafter(
    draft_model: DraftModel,
    config: DrafterConfig,
    directory: Path,
    *,
    target: Target,
    run: Mapping[str, Any] | None = None,
    serve_as: str = "",
    dtype: torch.dtype | None = None,
) -> ExportReport:
    """Write, prove and publish ``draft_model`` (float32 weights) as the new ``directory``.

    ``run``: facts for the model card (``run_facts``); ``serve_as``: the target's path in the serve commands; ``dtype``:
    stored dtype, by default float16 for a float16 target and bfloat16 otherwise.
    Raises ExportError; then ``directory`` does not exist, and nothing of the attempt is left beside it.
    """
    import torch

    from slipstream.data.pack import tokenizer_digest
    from slipstream.drafter.store import save_drafter
    from slipstream.export.proof import prove, read_config
    from slipstream.provenance import sync_directory, write_atomically, write_json

    _refuse_existing(directory)
    facts = dict(run or {})
    trained_for = facts.get("target_digest")
    if trained_for and trained_for != target.info.digest:
        raise ExportError(
            f"the drafter was trained for target {facts.get('target') or ''} ({trained_for[:12]}), "
            f"{target.info.name} is another "
            f"({target.info.digest[:12]}); give the trained one with --target.path"
        )
    trained_with = facts.get("tokenizer_digest")
    if trained_with and trained_with != (now := tokenizer_digest(target.tokenizer)):
        raise ExportError(
            f"the drafter was trained with another tokenizer or chat template ({trained_with[:12]}) than that of "
            f"target {target.info.name} ({now[:12]}); give the trained one with --target.path"
        )
    stored = dtype or (torch.float16 if target.dtype == torch.float16 else torch.bfloat16)
    state = {name: tensor.detach().cpu() for name, tensor in draft_model.state_dict().items()}
    ids = proof_ids(target)
    served = serve_as or target.info.name
    aside = directory.with_name(f".{directory.name}.partial-{os.getpid()}-{secrets.token_hex(3)}")
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        save_drafter(draft_model, config, aside, dtype=stored)
        # vLLM counts layer outputs from 1, with the embedding as 0, and takes these as they are.
        served_config = {
            **read_config(aside),
            "eagle_aux_hidden_state_layer_ids": [i + 1 for i in config.target_layer_ids],
        }
        write_json(aside / "config.json", served_config)
        proof = prove(aside, state=state, config=config, target=target, dtype=stored, ids=ids)
        written = read_config(aside)
        commands = serve_commands(written, target=served, drafter=str(directory), hybrid=target.info.is_hybrid)
        scale = _embedding_is_scaled(target)
        notes = tuple(engine_notes(written, scaled_embedding=scale, hybrid=target.info.is_hybrid))
        if "evaluation" in facts and measured_tau(facts["evaluation"]) is None:
            notes += (
                "evaluation.json has no number tau, so none is given: measure again with slipstream evaluate RUN",
            )
        if facts.get("evaluated_other"):
            notes += ("evaluation.json measured other weights, so none of it is given: slipstream evaluate RUN",)
        card = model_card(written, proof=proof, commands=commands, notes=notes, facts=facts, target=target)
        write_atomically(aside / "README.md", card)
        _sync_files(aside)
        _refuse_existing(directory)
        os.rename(aside, directory)
        sync_directory(directory.parent)
    except BaseException as error:
        shutil.rmtree(aside, ignore_errors=True)
        if isinstance(error, ExportError):
            raise
        if isinstance(error, SlipstreamError):
            raise ExportError(f"{directory} was not exported: {error}") from error
        if isinstance(error, OSError) or type(error).__name__ == "SafetensorError":
            reason = getattr(error, "strerror", None) or str(error)
            raise ExportError(
                f"{directory} cannot be written: {reason}; make room or rights there and export again"
            ) from error
        raise
    return ExportReport(directory=directory, proof=proof, commands=commands, notes=notes)


def served_path(path: str, target: Target) -> str:
    """Return what a server is given for a target: its path, or the converted directory of a .gguf or ``smollm2``."""
    from slipstream.target.source import resolve_path

    place = resolve_path(path)
    return path if isinstance(place, str) or place.is_dir() else str(target.model.name_or_path)


def drafter_of_run(run_dir: Path) -> Path:
    """Return a run's drafter directory: the finished one, else the newest complete checkpoint's. Raises ExportError."""
    from slipstream.training.checkpoint import latest_checkpoint

    finished = run_dir / "drafter"
    if (finished / "config.json").is_file():
        return finished
    checkpoint = latest_checkpoint(run_dir / "checkpoints")
    if checkpoint is None:
        raise ExportError(
            f"{run_dir} has neither drafter/ nor a complete checkpoint; train it first: slipstream train RECIPE"
        )
    return checkpoint / "drafter"


def run_facts(run_dir: Path, source: Path) -> dict[str, Any]:
    """Return what the run's files say: digests of target and tokenizer, data key, step, run id, and evaluation.json if
    it measured the weights in ``source``.

    The identity is the checkpoint's; that of run.json where checkpoints/ was removed. Raises ExportError.
    """
    from slipstream.drafter.store import weights_digest
    from slipstream.training.checkpoint import complete_checkpoints

    facts: dict[str, Any] = {}
    run = _read_json(run_dir / "run.json")
    identity, told_by = run.get("identity"), run_dir / "run.json"
    checkpoints = complete_checkpoints(run_dir / "checkpoints")
    inside = [c for c in checkpoints if c in source.parents]
    if inside or checkpoints:
        path = (inside or checkpoints)[-1] / "state.json"
        state = _read_json(path)
        facts["step"] = state.get("step")
        if state.get("identity"):
            identity, told_by = state["identity"], path
    if not isinstance(identity, dict):
        identity = {}
    facts["run_id"] = run.get("run_id")
    for fact, name in (
        ("target_digest", "target.digest"), ("tokenizer_digest", "tokenizer.digest"), ("data_key", "data.key")
    ):  # fmt: skip
        facts[fact] = identity.get(name)
        if not isinstance(facts[fact], str | None):
            raise ExportError(f"{told_by}: {name} is {facts[fact]!r}, not a digest; restore the file")
    evaluation = _read_json(run_dir / "evaluation.json")
    measured = evaluation.get("drafter_digest")
    if measured is not None and measured != weights_digest(source):
        facts["evaluated_other"] = True
    elif evaluation:
        facts["evaluation"] = evaluation
    return {name: value for name, value in facts.items() if value is not None}


def _read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object, empty where the file is absent. Raises ExportError for a damaged one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ExportError(f"{path} cannot be read: {one_line(error)}; mend or remove it") from None
    return value if isinstance(value, dict) else {}


def proof_ids(target: Target) -> list[int]:
    """Return the proof text in the target's tokens. Raises ExportError where the tokenizer makes fewer than two."""
    ids = target.tokenizer(PROOF_TEXT, add_special_tokens=False)["input_ids"]
    limit = min(128, target.info.max_positions or 128)
    if len(ids) < 2:
        raise ExportError(f"the target's tokenizer turns text into {len(ids)} tokens; it is not this model's tokenizer")
    return [int(i) for i in ids[:limit]]


def _embedding_is_scaled(target: Target) -> bool:
    """Say whether the target's embedding module returns something else than its weight's rows."""
    import torch

    ids = torch.tensor([0, 1], device=target.device)
    return not torch.equal(target.embed(ids), target.parts.embed_tokens.weight[ids])


def _refuse_existing(directory: Path) -> None:
    try:
        os.lstat(directory)
    except (FileNotFoundError, NotADirectoryError):
        return
    except (OSError, ValueError) as error:  # too long, a NUL, not encodable, a directory that may not be searched
        reason = getattr(error, "strerror", None) or one_line(error)
        shown = ascii(str(directory)) if len(str(directory)) <= 100 else ascii(str(directory)[:97]) + "..."
        raise ExportError(f"{shown} cannot be written ({reason}); give another name with --to") from None
    else:
        raise ExportError(
            f"{directory} exists and is not overwritten; give another name with --to, or remove it yourself"
        )


def _sync_files(directory: Path) -> None:
    """Have contents on the disk before the name is."""
    from slipstream.provenance import sync_directory

    for path in sorted(directory.iterdir()):
        with contextlib.closing(open(path, "rb")) as stream:
            os.fsync(stream.fileno())
    sync_directory(directory)


def _say(console: Console | None, text: str) -> None:
    if console is not None:
        console.print(text, markup=False, soft_wrap=True)
