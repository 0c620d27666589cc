"""Arrays on disk: one file for each key, written aside and renamed, checked by digest when read, locked while built.

A file is safetensors (read through a memory map), so that several processes share one copy and any tool can open it.
It carries a digest of the code that made it: what other code rendered is built anew, never taken for one's own.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import os
import struct
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.errors import DataError

_DTYPES = {"I32": np.int32, "I64": np.int64, "BOOL": np.bool_}


# Modules of this package that turn a source into rows; a new one of that kind belongs here.
_ROW_MODULES = ("conversations", "fit", "pack", "reason", "render", "rows", "template")
# Libraries whose version can change what a template renders or which ids a text gets.
_ROW_LIBRARIES = ("transformers", "tokenizers", "jinja2")


class DamagedCache(Exception):
    """A cache file is not what was written. The caller rebuilds it and says so."""


def row_sources() -> list[Path]:
    """Return the source files that decide how rows come out of conversations."""
    here = Path(__file__).parent
    return [here.parent / "records.py", *(here / f"{name}.py" for name in _ROW_MODULES)]


@cache
def code_digest() -> str:
    """Return a digest of the code that makes rows: our own modules' sources, and the versions of what they call.

    Computed once for a process. Files are stamped with it, so that no format number has to be remembered.
    """
    digest = hashlib.sha256()
    for source in row_sources():
        digest.update(f"{source.name}\0".encode())
        with contextlib.suppress(OSError):  # installed without sources: the version, below, stands for them
            digest.update(hashlib.sha256(source.read_bytes()).digest())
    for library in ("slipstream", *_ROW_LIBRARIES):
        try:
            version = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            version = ""
        digest.update(f"{library} {version}\0".encode())
    return digest.hexdigest()[:32]


def write_arrays(path: Path, arrays: dict[str, np.ndarray], note: dict[str, Any]) -> None:
    """Write arrays (int32, int64, bool) and a JSON note, atomically: readers see the old file, none, or all of the new.

    Raises DataError if it cannot be written (full disk, no permission); then nothing is left behind.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    whole = {name: np.ascontiguousarray(a) for name, a in arrays.items()}
    text = json.dumps(
        {"note": note, "code": code_digest(), "digests": {n: _digest(a) for n, a in whole.items()}}, sort_keys=True
    )
    # One key: safetensors writes several in an order that varies, and equal data is to give equal bytes.
    metadata = {"slipstream": f"{hashlib.sha256(text.encode()).hexdigest()} {text}"}
    aside = path.with_name(f"{path.name}.{os.getpid()}-{os.urandom(4).hex()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(whole, aside, metadata=metadata)
        with aside.open("rb") as stream:
            os.fsync(stream.fileno())
        os.replace(aside, path)
    except (OSError, SafetensorError) as error:
        raise DataError(
            f"the cache file {path} cannot be written ({error}); free space or set SLIPSTREAM_CACHE to another place"
        ) from None
    finally:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)


def read_arrays(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return the arrays, read-only and memory-mapped, and the note. Every byte is compared with its digest first.

    Raises FileNotFoundError if there is no file, or one that other code made, and DamagedCache if it is not whole.
    """
    with path.open("rb") as stream:
        prefix = stream.read(8)
        size = os.fstat(stream.fileno()).st_size
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 0 < length <= size - 8:
            raise DamagedCache("its header is cut off")
        try:
            header = json.loads(stream.read(length))
            digest, _, text = header.pop("__metadata__")["slipstream"].partition(" ")
            whole = hashlib.sha256(text.encode()).hexdigest() == digest
            told = json.loads(text)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedCache(f"its header cannot be read ({type(error).__name__})") from None
        if not whole or set(told["digests"]) != set(header):
            raise DamagedCache("its header was changed")
        if told.get("code") != code_digest():
            raise FileNotFoundError(f"the cache file {path} was made by other code")
        arrays: dict[str, np.ndarray] = {}
        for name, entry in header.items():
            try:
                dtype, (begin, end), shape = _DTYPES[entry["dtype"]], entry["data_offsets"], tuple(entry["shape"])
                if 8 + length + end > size or (end - begin) != int(np.prod(shape)) * np.dtype(dtype).itemsize:
                    raise DamagedCache("it is cut off")
                if begin == end:
                    array = np.zeros(shape, dtype)
                else:
                    array = np.memmap(stream, dtype=dtype, mode="r", offset=8 + length + begin, shape=shape)
            except (KeyError, TypeError, ValueError) as error:
                raise DamagedCache(f"its header cannot be read ({type(error).__name__})") from None
            if _digest(array) != told["digests"][name]:
                raise DamagedCache(f"the bytes of {name} were changed")
            arrays[name] = array
    return arrays, told["note"]


@contextlib.contextmanager
def build_lock(path: Path) -> Iterator[None]:
    """Hold the lock of a cache file: others that would build the same wait here.

    The kernel frees it when a process dies. Leavings of writers that were killed are removed, which is safe because
    the lock's holder is the only writer.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_name(path.name + ".lock").open("w")
    except OSError as error:
        raise DataError(
            f"the cache directory {path.parent} cannot be used ({error.strerror or error}); "
            "set SLIPSTREAM_CACHE to a directory that can be written"
        ) from None
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for leaving in path.parent.glob(f"{path.name}.*.tmp"):
            leaving.unlink(missing_ok=True)
        yield


def _digest(array: np.ndarray) -> str:
    """SHA-256 of dtype, shape and bytes."""
    digest = hashlib.sha256(f"{array.dtype.str}{array.shape}".encode())
    digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
