"""Checkpoints that are either whole or not there.

::

    checkpoints/step-40/
        drafter/               config.json and model.safetensors in float32: what evaluation and export read
        optimizer.safetensors  moments or momentum, and step counts, float32
        state.safetensors      metric window and random generators
        state.json             step, time used, and the identity that a resume must match
        COMPLETE               size and sha256 of each file above; written last

A checkpoint is written to ``.writing-step-40``, synced to the disk, marked, and only then renamed. A process killed at
any point leaves a name that nothing reads; resume reads the newest ``step-N`` whose marker agrees with its files, bit
for bit.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
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
from slipstream.provenance import plain, sync_directory, write_json
from slipstream.training.disk import free_bytes, size_words

MARKER = "COMPLETE"
ROWS_NAME = "data.rows"  # the identity's name for the rows themselves
FORMAT = 1
# Settings that checkpoints of earlier versions do not name, with what those versions did.
_SINCE = {"training.optimizer": "adamw", "training.labels": "hard"}
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


def _digest(path: Path) -> str:
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _digests(directory: Path) -> dict[str, str]:
    """Return the sha256 of every file below ``directory``, marker excluded, by relative name."""
    return {name: _digest(directory / name) for name in _files(directory)}


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
    if damage(final) is None:
        return final  # resumed from it and stopped again before the next step
    aside = directory / f".writing-{final.name}"
    needed = _size(optimizer)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        remove_leftovers(directory)
        free = free_bytes(directory)
        if needed > free:
            raise OSError(errno.ENOSPC, f"it needs {size_words(needed)} and {size_words(free)} are free")
        write_tree(aside, state, write_drafter=write_drafter, optimizer=optimizer)
        marker = {"format": FORMAT, "step": state.step, "files": _files(aside), "sha256": _digests(aside)}
        write_json(aside / MARKER, marker)
        if final.exists():  # a damaged copy, which resume did not trust
            _remove(final)
        os.rename(aside, final)
        sync_directory(directory)
    except BaseException as error:
        shutil.rmtree(aside, ignore_errors=True)
        if (reason := _write_failure(error)) is not None:
            raise CheckpointError(
                f"checkpoint {final} cannot be written: {reason}; {_what_is_left(directory)}"
            ) from error
        raise
    # Newer ones are those that a resume found damaged; they must not push out what is written after it.
    for old in [p for p in complete_checkpoints(directory) if _step(p) <= state.step][:-keep]:
        _remove(old)
    return final


def _size(optimizer: Mapping[str, Tensor]) -> int:
    """Return about how many bytes a checkpoint takes: optimizer state, and weights as large as a state of each."""
    weights: dict[str, int] = {}
    for name, tensor in optimizer.items():
        parameter = name.partition(".")[2]
        weights[parameter] = max(weights.get(parameter, 0), tensor.nbytes)
    return sum(weights.values()) + sum(tensor.nbytes for tensor in optimizer.values())


def _what_is_left(directory: Path) -> str:
    """Say from where a run can go on after a failed save."""
    try:
        found = complete_checkpoints(directory)
    except OSError:
        found = []
    if not found:
        return "there is no checkpoint to go on from: make room or rights there, then start another run.directory"
    older = f"older checkpoint {found[-1].name} is" if len(found) == 1 else "older checkpoints are"
    return f"{older} intact: make room or rights there, then continue with --resume"


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


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def _named(directory: Path) -> list[Path]:
    """Return everything named ``step-N``, oldest first."""
    if not directory.is_dir():
        return []
    return sorted((p for p in directory.iterdir() if _NAME.fullmatch(p.name)), key=_step)


def complete_checkpoints(directory: Path) -> list[Path]:
    """Return the checkpoints whose marker agrees with the sizes of the files there, oldest first. Fast: see damage."""
    return [p for p in _named(directory) if is_complete(p)]


def _marked_digests(checkpoint: Path) -> dict[str, str] | None:
    """Return the marker's digests by name; None without a marker, or where a file has not the size that it lists."""
    try:
        marker = json.loads((checkpoint / MARKER).read_text(encoding="utf-8"))
        sizes, digests = marker["files"], marker["sha256"]
        found = {name: (checkpoint / name).stat().st_size for name in sizes}
        whole = bool(found) and found == sizes and digests.keys() == sizes.keys()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return dict(digests) if whole else None


def is_complete(checkpoint: Path) -> bool:
    """Say whether the marker is there and every file that it lists has the size that it lists."""
    return _marked_digests(checkpoint) is not None


def damage(checkpoint: Path) -> str | None:
    """Return what is wrong with a checkpoint, naming the file; None where every file is as it was written, to the bit.

    Reads all of it.
    """
    digests = _marked_digests(checkpoint)
    if digests is None:
        return "is incomplete"
    for name, expected in digests.items():
        try:
            same = _digest(checkpoint / name) == expected
        except OSError as error:
            return f"is damaged: {name} cannot be read ({error.strerror})"
        if not same:
            return f"is damaged: {name} is not what was written (another sha256)"
    return None


def latest_checkpoint(directory: Path, say: Callable[[str], object] | None = None) -> Path | None:
    """Return the newest checkpoint that is whole to the bit, or None. ``say`` is told of each that was passed over."""
    for checkpoint in reversed(_named(directory)):
        wrong = damage(checkpoint)
        if wrong is None:
            return checkpoint
        if say is not None:
            say(f"checkpoint {checkpoint} {wrong}")
    return None


def read_checkpoint(checkpoint: Path) -> tuple[TrainingState, dict[str, Tensor]]:
    """Return the state and the optimizer's tensors (CPU). Raises CheckpointError if a file is not what was written."""
    wrong = damage(checkpoint)
    if wrong is not None:
        raise CheckpointError(f"checkpoint {checkpoint} {wrong}; resume from another one or start a new run")
    try:
        record = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
        if record.pop("format") != FORMAT:
            raise CheckpointError(
                f"checkpoint {checkpoint} has another format; resume it with the version that wrote it"
            )
        _check_state(record)
        state = TrainingState(**record, tensors=load_file(checkpoint / "state.safetensors"))
        return state, load_file(checkpoint / "optimizer.safetensors")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"checkpoint {checkpoint} cannot be read: {reason}; remove it to use an older one"
        ) from error


def _check_state(record: Mapping[str, Any]) -> None:
    """Raise ValueError naming the first value of ``state.json`` that no run writes."""
    kinds: dict[str, tuple[type, ...]] = {
        "step": (int,), "elapsed": (int, float), "tokens": (int,), "run_id": (str,), "identity": (dict,)
    }  # fmt: skip
    for name, kind in kinds.items():
        value = record[name]
        sound = type(value) in kind and (not isinstance(value, (int, float)) or (math.isfinite(value) and value >= 0))
        if not sound:
            raise ValueError(f"state.json has {name} = {value!r}")


def check_identity(saved: Mapping[str, Any], current: Mapping[str, Any], checkpoint: Path) -> None:
    """Raise CheckpointError naming the first difference and both values.

    A resumed run must repeat an uninterrupted one exactly, so target, tokenizer, data, drafter and every training
    setting that moves the weights have to be the same.
    """
    saved = {**_SINCE, **saved} if any(name in current for name in _SINCE) else saved
    for name in [*saved, *(n for n in current if n not in saved)]:
        before, now = plain(saved.get(name)), plain(current.get(name))
        if before != now and name == ROWS_NAME:
            raise CheckpointError(
                f"{checkpoint} was made with {name} = {before!r}, this run has {now!r}: the same data gives other rows "
                "here; resume with the versions of slipstream, transformers and tokenizers in its run.json, or start "
                f"another run.directory with drafter.warm_start = {str(checkpoint / 'drafter')!r}"
            )
        if before != now:
            raise CheckpointError(
                f"{checkpoint} was made with {name} = {before!r}, this run has {now!r}; resume with the old value, "
                "or start "
                f"another run.directory with drafter.warm_start = {str(checkpoint / 'drafter')!r}"
            )
