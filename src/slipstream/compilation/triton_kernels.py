"""Compiled Triton kernels, out of one process and into the cache of another.

What torch compiles travels in torch's own artifacts. Kernels that libraries launch themselves, FLA's above all, lie in
Triton's cache alone: a tuning result spares their timing, not their compilation. Taken are those that a step launches,
not the many that were only timed.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import re
import sys
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from slipstream.compilation.bundle import UNREADABLE_ZIP
from slipstream.compilation.hooks import when_imported
from slipstream.compilation.locks import new_lock

_COMPILER = "triton.compiler.compiler"
_HASH = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[^/\\\x00-\x1f]{1,255}")
_BINARIES = (".cubin", ".hsaco", ".spv")
_LARGEST = 1 << 30  # bytes of all kernels, unpacked

Files = dict[str, bytes]

_lock = new_lock()
_compiled = 0
_counting = False
_heard: Any = None


@contextlib.contextmanager
def launched() -> Iterator[dict[str, Any]]:
    """Collect the kernels that Triton's own launcher starts meanwhile, in any thread: a dict by hash, filling up.

    Inductor's launches do not pass there. Not reentrant; for a process that prewarms.
    """
    found: dict[str, Any] = {}
    module = sys.modules.get(_COMPILER)
    if module is None:
        yield found
        return
    kernel: Any = module.CompiledKernel  # type: ignore[attr-defined]
    upstream = kernel.launch_metadata

    @functools.wraps(upstream)
    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        found[self.hash] = self
        return upstream(self, *args, **kwargs)

    kernel.launch_metadata = noted
    try:
        yield found
    finally:
        kernel.launch_metadata = upstream


def collect(kernels: Mapping[str, Any]) -> dict[str, Files]:
    """Return the files of compiled kernels by hash and name, in order. Left out are kernels whose files have gone."""
    found: dict[str, Files] = {}
    for key in sorted(kernels):
        try:
            group = {name: Path(path).read_bytes() for name, path in kernels[key].metadata_group.items()}
        except OSError:
            continue
        if not _fault(key, group):
            found[key] = group
    return found


def encode(kernels: Mapping[str, Files]) -> bytes:
    """Return the files as a zip archive, the same bytes for the same files."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for key, files in kernels.items():
            for name in sorted(files):
                member = zipfile.ZipInfo(f"{key}/{name}")
                member.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(member, files[name])
    return buffer.getvalue()


def decode(content: bytes) -> dict[str, Files]:
    """Return the files that ``encode`` wrote; nothing for no bytes. Raises ValueError for anything else."""
    found: dict[str, Files] = {}
    if not content:
        return found
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            members = archive.infolist()
            if sum(member.file_size for member in members) > _LARGEST:
                raise ValueError(f"its kernels unpack to more than {_LARGEST >> 20} MiB")
            for member in members:
                key, _, name = member.filename.partition("/")
                found.setdefault(key, {})[name] = archive.read(member)
    except UNREADABLE_ZIP as error:
        raise ValueError(f"no archive of kernels ({error})") from None
    for key, files in found.items():
        if fault := _fault(key, files):
            raise ValueError(f"{key[:12]!r} is no kernel of Triton's: {fault}")
    return found


def restore(kernels: Mapping[str, Files]) -> int:
    """Put kernels into this process's Triton cache, where they do not lie whole yet; return how many were put.

    A kernel's files are only looked up under the hash of its source, options and compiler: one that no longer fits is
    never met. Imports Triton where there is something to put. Raises OSError where the cache cannot be written, and
    RuntimeError where there is none.
    """
    if not kernels:
        return 0
    from triton.runtime.cache import get_cache_manager

    put = 0
    for key, files in kernels.items():
        manager = get_cache_manager(key)
        if not _lies_there(manager, files):
            group = {name: manager.put(content, name) for name, content in files.items()}
            manager.put_group(_metadata_names(files)[0], group)
            put += 1
    return put


def _lies_there(manager: Any, files: Files) -> bool:
    """Whether all files are in the cache with these bytes; an entry that was torn is not."""
    try:
        group = manager.get_group(_metadata_names(files)[0]) or {}
        return all(name in group and Path(group[name]).read_bytes() == content for name, content in files.items())
    except Exception:  # whatever lies there in its place
        return False


def count_compiled() -> None:
    """Count from now on what Triton compiles in this process; a listener that is set stays. Idempotent, thread-safe."""
    global _counting
    with _lock:
        if _counting:
            return
        _counting = True
    when_imported("triton.knobs", _listen)


def compiled() -> int | None:
    """Return how many kernels Triton has compiled, not found, since ``count_compiled`` (inductor's workers' not).

    None where somebody has put a listener in place of the one that counts.
    """
    knobs = sys.modules.get("triton.knobs")
    if knobs is not None and (_heard is None or knobs.compilation.listener is not _heard):
        return None
    return _compiled


def _listen(knobs: ModuleType) -> None:
    global _heard
    settings: Any = knobs.compilation  # type: ignore[attr-defined]
    if not hasattr(settings, "listener"):
        return
    before = settings.listener

    def heard(**told: Any) -> Any:
        global _compiled
        if not told.get("cache_hit", True):
            with _lock:
                _compiled += 1
        return before(**told) if before is not None else None

    settings.listener = _heard = heard


def _metadata_names(files: Mapping[str, Any]) -> list[str]:
    return [name for name in files if name.endswith(".json")]


def _fault(key: str, files: Mapping[str, bytes]) -> str:
    """Return why these are not the files of the kernel with that hash, or nothing."""
    if not _HASH.fullmatch(key):
        return "its hash is none"
    for name in files:
        if not _NAME.fullmatch(name) or name.startswith((".", "__grp__")) or name == "lock":
            return f"{name!r} is no file of a kernel"
    described = _metadata_names(files)
    if len(described) != 1:
        return f"{len(described)} files describe it"
    try:
        told = json.loads(files[described[0]])
        fits = isinstance(told, dict) and told.get("hash") == key and isinstance(told.get("target"), dict)
    except (ValueError, RecursionError):
        fits = False
    if not fits:
        return f"{described[0]} describes another one, or none"
    return "" if any(name.endswith(_BINARIES) and content for name, content in files.items()) else "it has no binary"
