"""Compiled Triton kernels, out of one process and into the cache of another.

What torch compiles travels in torch's own artifacts. Kernels that libraries launch themselves, FLA's above all, lie in
Triton's cache alone: a tuning result spares their timing, not their compilation. Taken are those that a step launches,
not the many that were only timed.
"""

from __future__ import annotations

import contextlib
import functools
import io
import re
import sys
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from slipstream.compilation.hooks import when_imported
from slipstream.compilation.locks import new_lock

_COMPILER = "triton.compiler.compiler"
_HASH = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[^/\\\0]{1,255}")

Files = dict[str, bytes]

_lock = new_lock()
_compiled = 0
_counting = False


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
        if _HASH.fullmatch(key) and _metadata_name(group):
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
            for member in archive.infolist():
                key, _, name = member.filename.partition("/")
                if not _HASH.fullmatch(key) or not _NAME.fullmatch(name) or name.startswith("."):
                    raise ValueError(f"{member.filename!r} names no kernel's file")
                found.setdefault(key, {})[name] = archive.read(member)
    except zipfile.BadZipFile as error:
        raise ValueError(f"no archive of kernels ({error})") from None
    if not all(_metadata_name(files) for files in found.values()):
        raise ValueError("a kernel lacks its metadata")
    return found


def restore(kernels: Mapping[str, Files]) -> int:
    """Put kernels into this process's Triton cache, where they are not there yet; return how many were put.

    A kernel's files are only looked up under the hash of its source, options and compiler: one that no longer fits is
    never met. Imports Triton where there is something to put. Raises OSError where the cache cannot be written.
    """
    if not kernels:
        return 0
    from triton.runtime.cache import get_cache_manager

    put = 0
    for key, files in kernels.items():
        manager = get_cache_manager(key)
        metadata = _metadata_name(files)
        there = manager.get_group(metadata) or {}
        if set(files) <= set(there):
            continue
        manager.put_group(metadata, {name: manager.put(content, name) for name, content in files.items()})
        put += 1
    return put


def count_compiled() -> None:
    """Count from now on what Triton compiles in this process; a listener that is set stays. Idempotent, thread-safe."""
    global _counting
    with _lock:
        if _counting:
            return
        _counting = True
    when_imported("triton.knobs", _listen)


def compiled() -> int:
    """Return how many kernels Triton has compiled, not found, since ``count_compiled`` (inductor's workers' not)."""
    return _compiled


def _listen(knobs: ModuleType) -> None:
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

    settings.listener = heard


def _metadata_name(files: Mapping[str, Any]) -> str:
    """Return the name of the one file that describes a kernel; nothing where there is none."""
    return next((name for name in files if name.endswith(".json") and not name.startswith("__grp__")), "")
