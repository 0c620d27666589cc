"""Checkpoints that are either whole or not there.

::

    checkpoints/step-40/
        drafter/               config.json and model.safetensors in float32: what evaluation and export read
        optimizer.safetensors  moments and step counts, float32
        state.safetensors      metric window and random generators
        state.json             step, time used, and the identity that a resume must match
        COMPLETE               sizes of all files above; written last

A checkpoint is written to ``.writing-step-40``, synced to the disk, marked, and only then renamed. A process killed at
any point leaves a name that nothing reads; resume reads the newest ``step-N`` whose marker agrees with its files.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream.errors import CheckpointError
from slipstream.provenance import sync_directory, write_json

MARKER = "COMPLETE"
FORMAT = 1
_NAME = re.compile(r"step-(\d+)")
_ASIDE = (".writing-", ".removing-")


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """Where a run stands. ``step``: optimizer steps done, so that micro-batch ``step * accumulation`` is next.

    ``elapsed``: seconds of training, over all sessions. ``tokens``: tokens trained on. ``identity``: what a resume must
    match, by name. ``tensors``: the metric window and the random generators' states.
    """

    step: int
    elapsed: float
    tokens: int
    run_id: str
    identity: dict[str, Any]
    tensors: dict[str, Tensor] = field(default_factory=dict)


def _files(directory: Path) -> dict[str, int]:
    """Return the size of every file below ``directory``, marker excluded, by relative name."""
    found = sorted(p for p in directory.rglob("*") if p.is_file())
    return {str(p.relative_to(directory)): p.stat().st_size for p in found if p.name != MARKER}


def _sync_tree(directory: Path) -> None:
    for path in sorted(directory.rglob("*")):
        if path.is_dir():
            sync_directory(path)
        else:
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
    sync_directory(directory)


def write_tree(
    directory: Path,
    state: TrainingState,
    *,
    write_drafter: Callable[[Path], object],
    optimizer: Mapping[str, Tensor],
    extra: Mapping[str, Mapping[str, Tensor]] | None = None,
) -> None:
    """Write a checkpoint's files, synced, to a new ``directory``; no marker. ``extra``: tensors by file stem."""
    directory.mkdir(parents=True)
    write_drafter(directory / "drafter")
    groups = {"optimizer": optimizer, "state": state.tensors, **(extra or {})}
    for stem, tensors in groups.items():
        save_file({k: v.detach().contiguous() for k, v in tensors.items()}, directory / f"{stem}.safetensors")
    record = {f.name: getattr(state, f.name) for f in fields(state) if f.name != "tensors"}
    write_json(directory / "state.json", {"format": FORMAT, **record})
    mode = (directory / "state.json").stat().st_mode
    for path in directory.rglob("*.safetensors"):
        path.chmod(mode)  # the tensor writer makes files for their owner alone, whatever the umask says
    _sync_tree(directory)


def save_checkpoint(
    directory: Path,
    state: TrainingState,
    *,
    write_drafter: Callable[[Path], object],
    optimizer: Mapping[str, Tensor],
    keep: int,
) -> Path:
    """Write ``directory/step-N``, then remove all but the newest ``keep``. Returns its path.

    ``write_drafter(path)`` writes the drafter's directory. Raises CheckpointError (a full disk, no permission) with the
    older checkpoints intact and nothing half-written left behind.
    """
    final = directory / f"step-{state.step}"
    if is_complete(final):
        return final  # resumed from it and stopped again before the next step
    aside = directory / f".writing-{final.name}"
    needed = sum(t.numel() * t.element_size() for t in optimizer.values()) * 3 // 2
    try:
        directory.mkdir(parents=True, exist_ok=True)
        remove_leftovers(directory)
        free = shutil.disk_usage(directory).free
        if needed > free:
            raise OSError(errno.ENOSPC, f"it needs {needed / 2**30:.2f} GiB and {free / 2**30:.2f} GiB are free")
        write_tree(aside, state, write_drafter=write_drafter, optimizer=optimizer)
        write_json(aside / MARKER, {"format": FORMAT, "step": state.step, "files": _files(aside)})
        if final.exists():  # a damaged copy, which resume did not trust
            _remove(final)
        os.rename(aside, final)
        sync_directory(directory)
    except BaseException as error:
        shutil.rmtree(aside, ignore_errors=True)
        if (reason := _write_failure(error)) is not None:
            raise CheckpointError(
                f"checkpoint {final} cannot be written: {reason}; older checkpoints are intact: "
                "make room or rights there, then continue with --resume"
            ) from error
        raise
    for old in complete_checkpoints(directory)[:-keep]:
        _remove(old)
    return final


def _write_failure(error: BaseException) -> str | None:
    """Return why the disk refused, also where a writer has wrapped it; None for any other error."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError):
            return cause.strerror or str(cause)
        if isinstance(cause, SafetensorError):
            return str(cause)
        cause = cause.__cause__
    return None


def _remove(checkpoint: Path) -> None:
    """Take the name away first, so that a kill during removal cannot leave half a checkpoint under it."""
    doomed = checkpoint.with_name(f".removing-{checkpoint.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(checkpoint, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def remove_leftovers(directory: Path) -> list[str]:
    """Remove what a killed save or removal left (never a ``step-N``). Returns the names, for the log."""
    if not directory.is_dir():
        return []
    names = sorted(p.name for p in directory.iterdir() if p.name.startswith(_ASIDE))
    for name in names:
        shutil.rmtree(directory / name, ignore_errors=True)
    return names


def complete_checkpoints(directory: Path) -> list[Path]:
    """Return the trusted checkpoints, oldest first: a marker that agrees with the files there."""
    if not directory.is_dir():
        return []
    named = [(int(m.group(1)), p) for p in directory.iterdir() if (m := _NAME.fullmatch(p.name))]
    return [p for _, p in sorted(named) if is_complete(p)]


def is_complete(checkpoint: Path) -> bool:
    """Say whether the marker is there and every file that it lists has the size that it lists."""
    try:
        marker = json.loads((checkpoint / MARKER).read_text(encoding="utf-8"))
        sizes = {name: (checkpoint / name).stat().st_size for name in marker["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return bool(sizes) and sizes == marker["files"]


def latest_checkpoint(directory: Path) -> Path | None:
    """Return the newest trusted checkpoint in a run's ``checkpoints`` directory, or None."""
    found = complete_checkpoints(directory)
    return found[-1] if found else None


def read_checkpoint(checkpoint: Path) -> tuple[TrainingState, dict[str, Tensor]]:
    """Return the state and the optimizer's tensors (CPU). Raises CheckpointError if it is damaged."""
    if not is_complete(checkpoint):
        raise CheckpointError(f"checkpoint {checkpoint} is incomplete; resume from another one or start a new run")
    try:
        record = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
        if record.pop("format") != FORMAT:
            raise CheckpointError(
                f"checkpoint {checkpoint} has another format; resume it with the version that wrote it"
            )
        state = TrainingState(**record, tensors=load_file(checkpoint / "state.safetensors"))
        return state, load_file(checkpoint / "optimizer.safetensors")
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CheckpointError(
            f"checkpoint {checkpoint} cannot be read: {error}; remove it to use an older one"
        ) from error


def check_identity(saved: Mapping[str, Any], current: Mapping[str, Any], checkpoint: Path) -> None:
    """Raise CheckpointError naming the first difference and both values.

    A resumed run must repeat an uninterrupted one exactly, so target, tokenizer, data, drafter and every training
    setting that moves the weights have to be the same.
    """
    for name in [*saved, *(n for n in current if n not in saved)]:
        before, now = _plain(saved.get(name)), _plain(current.get(name))
        if before != now:
            raise CheckpointError(
                f"{checkpoint} was made with {name} = {before!r}, this run has {now!r}; resume with the old value, "
                "or start "
                f"another run.directory with drafter.warm_start = {str(checkpoint / 'drafter')!r}"
            )


def _plain(value: Any) -> Any:
    """Return the value as JSON would give it back (tuples become lists)."""
    return json.loads(json.dumps(value))
