"""The run directory: claimed once, never overwritten, and used by one process at a time."""

from __future__ import annotations

import fcntl
import json
import os
import tomllib
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from slipstream.config import Recipe
from slipstream.errors import CheckpointError, TrainingError
from slipstream.provenance import session_record, start_record, write_atomically, write_json
from slipstream.recipe import recipe_as_toml


class RunDirectory:
    """Paths of a run, and its lock. Use as a context manager: the lock is held inside, and dies with the process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.metrics = path / "metrics.jsonl"
        self.drafter = path / "drafter"
        self._lock: int | None = None

    def refuse_existing(self) -> None:
        """Raise TrainingError where something is there already. An empty directory may be used."""
        if self.path.is_dir() and not any(self.path.iterdir()):
            return
        if self.path.exists() or self.path.is_symlink():
            raise TrainingError(
                f"run directory {self.path} exists and is not overwritten; continue it with --resume, or choose "
                "another with --run.directory"
            )

    def require_existing(self) -> None:
        """Raise CheckpointError where there is no run to resume."""
        if not (self.path / "run.json").is_file():
            raise CheckpointError(f"there is no run in {self.path} to resume; start it without --resume")

    def create(self, recipe: Recipe, argv: Sequence[str], *, device: str) -> dict[str, Any]:
        """Claim a new directory; write ``recipe.toml`` and ``run.json``. Returns the record. Raises TrainingError."""
        record = start_record(argv, seed=recipe.run.seed, device=device)
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
        return record

    def reopen(self, recipe: Recipe, argv: Sequence[str], *, device: str, step: int) -> dict[str, Any]:
        """Note a resume at ``step`` in ``run.json``, with the settings that changed. Returns the record."""
        try:
            record: dict[str, Any] = json.loads((self.path / "run.json").read_text(encoding="utf-8"))
            before = tomllib.loads((self.path / "recipe.toml").read_text(encoding="utf-8"))
            after = tomllib.loads(recipe_as_toml(recipe))
            changed = {
                f"{section}.{key}": [before.get(section, {}).get(key), after.get(section, {}).get(key)]
                for section in {**before, **after}
                for key in {**before.get(section, {}), **after.get(section, {})}
                if before.get(section, {}).get(key) != after.get(section, {}).get(key)
            }
            session = {"from_step": step, "changed_settings": changed, **session_record(argv, device=device)}
            record["resumed"].append(session)
            write_atomically(self.path / "recipe.toml", recipe_as_toml(recipe))
            write_json(self.path / "run.json", record)
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(f"run directory {self.path} cannot be resumed: {error}") from error
        return record

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
        except OSError as error:
            raise TrainingError(f"run directory {self.path} cannot be locked: {error.strerror or error}") from error

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
