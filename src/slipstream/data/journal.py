"""An append-only log of answered conversations, so that a killed regeneration loses at most the batch it was in.

The first line identifies the work; each further line is one entry. Entries are appended and synced batch by batch. The
finished file is written beside the journal and renamed into place, so that an incomplete one never looks complete.
"""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import hashlib
import io
import json
import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from slipstream.errors import DataError


class Journal:
    """The open journal of one output file; a context manager. One process at a time holds it.

    ``entries`` are those that were found, whole. A torn last line (the process was killed while writing) is cut off.
    A journal of other work without a single answer (no entry has a ``row``) is begun anew.
    Raises DataError if another process holds it, if it holds answers of other work, or if it cannot be written.
    """

    def __init__(self, path: Path, identity: dict[str, Any]) -> None:
        self.path = path
        self.entries: list[dict[str, Any]] = []
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b", buffering=0)
        except OSError as error:
            raise DataError(f"{path} cannot be written: {error.strerror or error}; choose another --output") from None
        try:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise DataError(f"{path} is being written by another process; wait for it, or end it") from None
            self._read(identity)
        except BaseException:
            self._file.close()
            raise

    def _read(self, identity: dict[str, Any]) -> None:
        self._file.seek(0)
        text = self._file.read()
        whole = text.rfind(b"\n") + 1
        if whole < len(text):
            self._file.truncate(whole)
        lines = text[:whole].splitlines()
        for number, line in enumerate(lines, start=1):
            try:
                entry = json.loads(line)
                if not isinstance(entry, dict):
                    raise ValueError("not an object")
            except ValueError as error:
                raise DataError(
                    f"{self.path}:{number}: the journal is damaged ({error}); delete the file to start anew"
                ) from None
            self.entries.append(entry)
        if not lines:
            self._write([{"identity": identity}])
            return
        difference = describe_difference(self.entries.pop(0).get("identity"), identity)
        if difference and not any(entry.get("row") for entry in self.entries):
            self._file.truncate(0)  # other work, but nothing of it would be lost
            self.entries.clear()
            self._write([{"identity": identity}])
        elif difference:
            raise DataError(
                f"{self.path} holds answers of other work ({difference}); "
                "restore what was changed, choose another --output, or delete the file to start anew"
            )

    def append(self, entries: Iterable[dict[str, Any]]) -> None:
        """Write entries and sync them to disk. Raises DataError on a full disk; what was written before stays good."""
        new = list(entries)
        self._write(new)
        self.entries += new

    def _write(self, entries: list[dict[str, Any]]) -> None:
        data = b"".join(json.dumps(e, ensure_ascii=False).encode() + b"\n" for e in entries)
        self._file.seek(0, os.SEEK_END)
        before = self._file.tell()
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[self._file.write(rest) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file.fileno(), before)
            raise DataError(
                f"{self.path} cannot be written: {error.strerror or error}; "
                "free space and run the same command again: finished answers are kept"
            ) from None

    def delete(self) -> None:
        """Remove the journal; the work is complete."""
        self.path.unlink(missing_ok=True)

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def describe_difference(found: Any, wanted: dict[str, Any]) -> str:
    """Return what differs between two identities in words, or an empty string."""
    if found == wanted:
        return ""
    if not isinstance(found, dict):
        return "it has no identity"
    told = [
        f"{name} was {_short(found.get(name))}, now {_short(wanted.get(name))}"
        for name in {**found, **wanted}
        if found.get(name) != wanted.get(name)
    ]
    return "; ".join(told)


def write_whole(path: Path, data: bytes) -> None:
    """Write a file beside itself and rename it into place, gzipped (without a time stamp) if its name ends in .gz.

    Raises DataError if it cannot be written; then nothing is left behind.
    """
    if path.suffix == ".gz":
        packed = io.BytesIO()
        with gzip.GzipFile(filename="", mode="wb", fileobj=packed, mtime=0) as stream:
            stream.write(data)
        data = packed.getvalue()
    aside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with aside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError as error:
        raise DataError(
            f"{path} cannot be written: {error.strerror or error}; free space and run the command again"
        ) from None
    finally:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file's bytes."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 16 else text[:12] + "..."
