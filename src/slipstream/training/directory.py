"""The run directory: claimed once, never overwritten, and used by one process at a time."""

from __future__ import annotations

import fcntl
import json
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from slipstream.config import Recipe
from slipstream.errors import CheckpointError, TrainingError
from slipstream.provenance import package_versions, plain, session_record, start_record, write_atomically, write_json
from slipstream.recipe import recipe_as_toml
from slipstream.training.hardware import device_name

_LIBRARIES = ("slipstream", "torch", "transformers", "triton")  # those that compute, of all that are recorded


def _library_versions(session: Mapping[str, Any]) -> dict[str, Any]:
    """Return the versions that a session's record holds of the libraries that compute."""
    versions = session.get("versions")
    return {name: versions.get(name) for name in _LIBRARIES} if isinstance(versions, dict) else {}


class RunDirectory:
    """Paths of a run, and its lock. Use as a context manager: the lock is held inside, and dies with the process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.metrics = path / "metrics.jsonl"
        self.drafter = path / "drafter"
        self._lock: int | None = None

    def _bad_path(self, error: OSError | ValueError) -> str:
        """Say why no directory can have this path: a name too long, a NUL, no rights on the way."""
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        return f"run.directory is {str(self.path)!r}, which cannot be used: {reason}; give another with --run.directory"

    def refuse_existing(self) -> None:
        """Raise TrainingError where something is there already. An empty directory may be used."""
        try:
            os.lstat(self.path)
            if self.path.is_dir() and not any(self.path.iterdir()):
                return
            there = True
        except (FileNotFoundError, NotADirectoryError):
            there = False
        except (OSError, ValueError) as error:
            raise TrainingError(self._bad_path(error)) from error
        if there:
            raise TrainingError(
                f"run directory {self.path} exists and is not overwritten; continue it with --resume, or choose "
                "another with --run.directory"
            )

    def require_existing(self) -> None:
        """Raise CheckpointError where there is no run to resume."""
        try:
            os.lstat(self.path)
            found = (self.path / "run.json").is_file()
        except (FileNotFoundError, NotADirectoryError):
            found = False
        except (OSError, ValueError) as error:
            raise CheckpointError(self._bad_path(error)) from error
        if not found:
            raise CheckpointError(f"there is no run in {self.path} to resume; start it without --resume")

    def create(
        self, recipe: Recipe, argv: Sequence[str], *, device: str, identity: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Claim a new directory; write ``recipe.toml`` and ``run.json``. Returns the record. Raises TrainingError.

        ``identity``: as in the checkpoints; it says which target and data the drafter belongs to when they are gone.
        """
        record = start_record(argv, seed=recipe.run.seed, device=device, identity=identity)
        record["device_name"] = device_name(torch.device(device))
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._acquire()
            left = [p.name for p in self.path.iterdir() if p.name != ".lock"]
            if left:  # another process was faster
                raise TrainingError(f"run directory {self.path} exists and is not overwritten; it holds {left[0]}")
            write_atomically(self.path / "recipe.toml", recipe_as_toml(recipe))
            write_json(self.path / "run.json", record)
        except OSError as error:
            raise TrainingError(f"run directory {self.path} cannot be made: {error.strerror or error}") from error
        except ValueError as error:
            raise TrainingError(self._bad_path(error)) from error
        return record

    def _read(self, name: str) -> dict[str, Any]:
        """Return ``run.json`` or ``recipe.toml``. Raises CheckpointError where it is not what a run writes."""
        try:
            text = (self.path / name).read_text(encoding="utf-8")
            found = tomllib.loads(text) if name.endswith(".toml") else json.loads(text)
        except (OSError, ValueError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
            raise self._unusable(name, reason) from error
        if not isinstance(found, dict):
            raise self._unusable(name, f"it is {type(found).__name__}, not an object")
        return found

    def _unusable(self, name: str, reason: str) -> CheckpointError:
        return CheckpointError(
            f"run directory {self.path} cannot be resumed: {name}: {reason}; put back the file that the run wrote, "
            "or start another run with drafter.warm_start"
        )

    def reopen(
        self, recipe: Recipe, argv: Sequence[str], *, device: str, step: int, identity: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Note a resume at ``step`` in ``run.json``, with the settings that changed. Returns the record.

        ``identity`` is the one that the checkpoint was found to match. Raises CheckpointError for an edited file.
        """
        record = self._read("run.json")
        for key, kind in (("run_id", str), ("resumed", list)):
            if not isinstance(record.get(key), kind):
                raise self._unusable("run.json", f"{key} is {record.get(key)!r}")
        before = self._read("recipe.toml")
        for section, body in before.items():
            if not isinstance(body, dict):
                raise self._unusable("recipe.toml", f"{section} is {body!r}, but it is a section")
        try:
            after = tomllib.loads(recipe_as_toml(recipe))
            changed = {
                f"{section}.{key}": [before.get(section, {}).get(key), after.get(section, {}).get(key)]
                for section in {**before, **after}
                for key in {**before.get(section, {}), **after.get(section, {})}
                if before.get(section, {}).get(key) != after.get(section, {}).get(key)
            }
            session = {"from_step": step, "changed_settings": changed, **session_record(argv, device=device)}
            record["resumed"].append({**session, "device_name": device_name(torch.device(device))})
            if identity is not None:
                record["identity"] = plain(identity)
            write_atomically(self.path / "recipe.toml", recipe_as_toml(recipe))
            write_json(self.path / "run.json", record)
        except OSError as error:
            raise CheckpointError(
                f"run directory {self.path} cannot be resumed: {error.strerror or error}; make room or rights there"
            ) from error
        return record

    def environment_changes(self, device: str) -> list[str]:
        """Return what this process has other than any earlier session of the run, as ``name before -> now``.

        Libraries, threads and the device's model: they may change the last bits of a step, so that a resume repeats an
        uninterrupted run only where the list is empty. What a record does not hold is not compared.
        """
        now: dict[str, Any] = {
            **_library_versions({"versions": package_versions()}),
            "threads": torch.get_num_threads(),
            "device": device_name(torch.device(device)),
        }
        try:
            record = self._read("run.json")
        except CheckpointError:
            return []
        resumed = record.get("resumed")
        changed: dict[str, str] = {}
        for session in [record, *(resumed if isinstance(resumed, list) else [])]:
            if not isinstance(session, dict):
                continue
            before = {
                **_library_versions(session),
                "threads": session.get("threads"),
                "device": session.get("device_name"),
            }
            for name, value in now.items():
                if before.get(name) is not None and before[name] != value:
                    changed.setdefault(name, f"{name} {before[name]} -> {value}")
        return [changed[name] for name in now if name in changed]

    def _acquire(self) -> None:
        """Take the lock, or say who may hold it. A killed process holds none."""
        if self._lock is not None:
            return
        handle = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(handle)
            raise TrainingError(
                f"run directory {self.path} is in use by another process; wait for it, or stop it first"
            ) from None
        self._lock = handle

    def lock(self) -> None:
        """Take the lock of an existing run. Raises TrainingError where another process trains in it."""
        try:
            self._acquire()
        except (OSError, ValueError) as error:
            raise TrainingError(f"{self._bad_path(error)} (it cannot be locked)") from error

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
