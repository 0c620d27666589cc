"""One file that holds what was compiled and tuned: a line that seals, a readable header, raw bytes.

::

    slipstream compile bundle 1 <SHA-256 of the next line>
    {"environment": {...}, "work": {...}, "sections": [{"name", "bytes", "sha256"}], ...}
    <the sections' bytes, one after another>

Nothing here is pickled. What torch makes of its own section is torch's: it holds code that will run. A checksum tells
damage, not malice; load only bundles from machines that you trust.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import json
import lzma
import os
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

from slipstream.compilation.fingerprint import Fields, digest
from slipstream.errors import CompilationError
from slipstream.places import cache_directory

MAGIC = b"slipstream compile bundle"
VERSION = 1
SUFFIX = ".bundle"
DAMAGED = ".damaged"
LOCK = ".lock"
_LONGEST_LINE = 1 << 20

# What zipfile and its decompressors raise for a file that is no zip, was cut or changed, or is of an unknown kind.
UNREADABLE_ZIP = (
    zipfile.BadZipFile,
    zipfile.LargeZipFile,
    zlib.error,
    lzma.LZMAError,
    EOFError,
    NotImplementedError,
    RuntimeError,
    ValueError,
)


class DamagedBundle(Exception):
    """A file is not the bundle that was written. The caller says so and goes on without it."""


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """What is kept under one key.

    environment, work: the key (see fingerprint); about: what lists show, no part of the key; created: UTC, ISO 8601;
    sections: bytes by name. ``read_header`` leaves the sections empty.
    """

    environment: Fields
    work: Fields
    about: Fields = field(default_factory=dict)
    created: str = field(default_factory=_now)
    sections: dict[str, bytes] = field(default_factory=dict)


def directory() -> Path:
    """Return where bundles are kept. It may not exist yet."""
    return cache_directory() / "compiled"


def file_name(environment: Fields, work: Fields) -> str:
    """Return the name of a key's file. The same work in another environment has a name with the same beginning."""
    return f"{digest(work)}-{digest(environment)}{SUFFIX}"


def encode(bundle: Bundle) -> bytes:
    """Return the bytes of a bundle's file."""
    header = {
        "environment": bundle.environment,
        "work": bundle.work,
        "about": bundle.about,
        "created": bundle.created,
        "sections": [
            {"name": name, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            for name, content in bundle.sections.items()
        ],
    }
    line = json.dumps(header, sort_keys=True).encode()
    seal = hashlib.sha256(line).hexdigest().encode()
    return b"\n".join([b"%s %d %s" % (MAGIC, VERSION, seal), line, b"".join(bundle.sections.values())])


def _header(stream: BinaryIO) -> tuple[Bundle, list[dict[str, Any]]]:
    first, line = stream.readline(200), stream.readline(_LONGEST_LINE)
    words = first.rstrip(b"\n").rsplit(b" ", 2)
    if len(words) != 3 or words[0] != MAGIC:
        raise DamagedBundle("it is not a bundle")
    if words[1] != b"%d" % VERSION:
        raise DamagedBundle(f"it has format {words[1].decode(errors='replace')}, this version reads {VERSION}")
    if not line.endswith(b"\n"):
        raise DamagedBundle("its header is cut off")
    if not first.endswith(b"\n") or hashlib.sha256(line[:-1]).hexdigest().encode() != words[2]:
        raise DamagedBundle("its header was changed")
    try:
        told = json.loads(line)
        sections = [{"name": s["name"], "bytes": int(s["bytes"]), "sha256": s["sha256"]} for s in told["sections"]]
        kinds = {"environment": dict, "work": dict, "about": dict, "created": str}
        if any(not isinstance(told[name], kind) for name, kind in kinds.items()):
            raise TypeError
        if any(s["bytes"] < 0 or not isinstance(s["name"], str) for s in sections):
            raise ValueError
        json.dumps(told, ensure_ascii=False).encode("utf-8")  # a lone half of a character could not be shown
        return Bundle(**{name: told[name] for name in kinds}), sections
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise DamagedBundle(f"its header cannot be read ({type(error).__name__})") from None


def decode(stream: BinaryIO) -> Bundle:
    """Return the bundle that a binary stream holds. Raises DamagedBundle unless every byte is as it was written."""
    head, described = _header(stream)
    sections = {}
    left = _size_left(stream)
    for section in described:
        if section["bytes"] > left:  # before so much memory is asked for
            raise DamagedBundle(f"its section {section['name']} is cut off")
        content = stream.read(section["bytes"])
        left -= len(content)
        if hashlib.sha256(content).hexdigest() != section["sha256"]:
            raise DamagedBundle(f"its section {section['name']} was changed")
        sections[section["name"]] = content
    if stream.read(1):
        raise DamagedBundle("it is longer than its header says")
    head.sections.update(sections)
    return head


def _size_left(stream: BinaryIO) -> int:
    here = stream.tell()
    end = stream.seek(0, io.SEEK_END)
    stream.seek(here)
    return end - here


def read_bundle(path: Path) -> Bundle:
    """Return a whole bundle. Raises OSError where it cannot be read, DamagedBundle where it is not as written."""
    with path.open("rb") as stream:
        return decode(stream)


def read_header(path: Path) -> Bundle:
    """Return a bundle without its sections, whose bytes are not looked at. Raises OSError, DamagedBundle."""
    with path.open("rb") as stream:
        return _header(stream)[0]


def parse(content: bytes) -> Bundle:
    """Return the bundle of a file's bytes. Raises DamagedBundle."""
    return decode(io.BytesIO(content))


def write_bundle(where: Path, bundle: Bundle) -> Path:
    """Write a bundle under its key and return its path. Readers see the old file, none, or all of the new.

    Of two processes that write one key, the last wins. Raises CompilationError where the directory cannot be written
    or the disk is full, and then leaves what was there.
    """
    path = where / file_name(bundle.environment, bundle.work)
    try:
        where.mkdir(parents=True, exist_ok=True)
        with writing(where):
            write_whole(path, encode(bundle))
    except OSError as error:
        raise cannot_write(path, error) from None
    return path


def cannot_write(path: Path, error: OSError) -> CompilationError:
    """Return the error for a file of the cache that cannot be written."""
    return CompilationError(
        f"the compile bundle {path} cannot be written ({error.strerror or error}); free space, or set SLIPSTREAM_CACHE "
        "to a directory that can be written"
    )


def write_whole(path: Path, content: bytes) -> None:
    """Replace a file as a whole or not at all; its bytes are on the disk before its name is. Raises OSError."""
    aside = path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(4).hex()}.tmp")
    try:
        with aside.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(aside, path)
    finally:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)


@contextlib.contextmanager
def writing(where: Path) -> Iterator[None]:
    """Hold the lock of a directory's writers, which the kernel frees when one dies. Raises OSError.

    Leavings of writers that were killed are removed: the holder of the lock is the only writer.
    """
    with (where / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for leaving in where.glob(".*.tmp"):
            leaving.unlink(missing_ok=True)
        yield


def set_aside(path: Path) -> Path | None:
    """Rename a damaged bundle, so that it is not met again; return its new path, None where that cannot be done."""
    aside = path.with_name(path.name + DAMAGED)
    try:
        os.replace(path, aside)
    except OSError:
        return None
    return aside
