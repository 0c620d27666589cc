"""Where compiled code is kept and what surrounds it: caches, disks, shared memory, environment, C compiler.

Everything here is found and tried without importing torch or Triton, and leaves nothing behind.
"""

from __future__ import annotations

import getpass
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True)
class Variable:
    """An environment variable that matters here.

    level: what it is where ``acts(value)``: it bites, or is worth a note; "" is for one that is only shown.
    """

    name: str
    level: Literal["bites", "note", ""] = ""
    acts: Callable[[str], bool] = lambda value: False
    effect: str = ""


def _one(value: str) -> bool:
    return value == "1"


def _zero(value: str) -> bool:
    return value == "0"


def _empty(value: str | None) -> bool:
    return value == ""


def _yes(value: str) -> bool:
    """As Triton reads a switch."""
    return value.lower() in ("1", "true", "on", "y", "yes")


# Each test is the one that the library itself makes: torch takes any text in TORCHDYNAMO_SUPPRESS_ERRORS for true.
VARIABLES: tuple[Variable, ...] = (
    Variable("TORCHDYNAMO_DISABLE", "bites", _one, "compilation is switched off"),
    Variable("TORCH_COMPILE_DISABLE", "bites", _one, "compilation is switched off"),
    Variable("TORCHDYNAMO_SUPPRESS_ERRORS", "bites", bool, "what cannot be compiled runs uncompiled, unseen"),
    Variable("TRITON_INTERPRET", "bites", _yes, "Triton's kernels are interpreted, not compiled"),
    Variable("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "note", _one, "everything is compiled again at every start"),
    Variable("TORCHINDUCTOR_FX_GRAPH_CACHE", "note", _zero, "graphs are compiled again at every start"),
    Variable("TORCHINDUCTOR_COMPILE_THREADS", "note", _one, "kernels are compiled one after the other"),
    Variable("TRITON_ALWAYS_COMPILE", "note", _yes, "kernels are compiled again at every start"),
    Variable("FLA_DISABLE_TENSOR_CACHE", "note", _one, "FLA calculates its indices at every call: safe, but slower"),
    Variable("FLA_CACHE_RESULTS", "note", _zero, "FLA tunes its kernels again at every start"),
    Variable("CUDA_LAUNCH_BLOCKING", "note", _one, "every kernel is waited for: much slower"),
    Variable("PYTORCH_NO_CUDA_MEMORY_CACHING", "note", bool, "every tensor is allocated by the driver: much slower"),
    Variable("CUDA_VISIBLE_DEVICES", "note", lambda value: value.strip() in ("", "-1"), "every GPU is hidden"),
    Variable("TORCHINDUCTOR_CACHE_DIR", "bites", _empty, "an empty name is no directory to keep kernels in"),
    Variable("TRITON_CACHE_DIR", "bites", _empty, "an empty name is no directory to keep kernels in"),
    Variable("TRITON_HOME"),
    Variable("TRITON_CACHE_AUTOTUNING"),
    Variable("SLIPSTREAM_CACHE"),
    Variable("FLA_CACHE_MODE"),
    Variable("FLA_CONFIG_DIR"),
    Variable("TMPDIR"),
    Variable("CC"),
    Variable("CXX"),
    Variable("OMP_NUM_THREADS"),
    Variable("PYTORCH_ALLOC_CONF"),
    Variable("PYTORCH_CUDA_ALLOC_CONF"),
)


def environment() -> list[dict[str, Any]]:
    """Return every variable with its value (None: not set), and with level, effect and cure where it acts."""
    rows = []
    for variable in VARIABLES:
        value = os.environ.get(variable.name)
        acts = value is not None and variable.acts(value)
        rows.append(
            {
                "name": variable.name,
                "value": value,
                "level": variable.level if acts else "",
                "effect": variable.effect if acts else "",
                "cure": f"unset {variable.name}" if acts else "",
            }
        )
    return rows


def cache_places(slipstream: Path) -> list[tuple[str, Path, str]]:
    """Return (name, path, the variable that moves it) of each cache; ``slipstream``: where Slipstream keeps its own."""
    return [
        ("inductor", _inductor(), "TORCHINDUCTOR_CACHE_DIR"),
        ("Triton", _triton(), "TRITON_CACHE_DIR"),
        ("Slipstream", slipstream, "SLIPSTREAM_CACHE"),
    ]


def _inductor() -> Path:
    given = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if given is not None:
        return _absolute(given)
    try:
        user = getpass.getuser()
    except (KeyError, ImportError, OSError):  # a container's user without a name
        user = f"uid_{os.getuid()}"
    try:
        temporary = tempfile.gettempdir()
    except FileNotFoundError:  # no directory takes a file: told where the first process is to be started
        temporary = "/tmp"
    return Path(temporary, "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user))


def _triton() -> Path:
    given = os.environ.get("TRITON_CACHE_DIR")
    if given is not None:
        return _absolute(given)
    return Path(os.environ.get("TRITON_HOME", os.path.expanduser("~/")), ".triton", "cache")


def unusable(slipstream: Path) -> list[str]:
    """Return the variables of torch's and Triton's caches in which nothing can be kept as things are."""
    return [variable for _, path, variable in cache_places(slipstream)[:2] if why_unusable(path, variable)]


def why_unusable(path: Path, variable: str) -> str:
    """Return why nothing can be kept in a cache that ``variable`` moves, or nothing where it can."""
    return "its name is empty" if _empty(os.environ.get(variable)) else _why_unwritable(path)


def is_there() -> bool:
    """Whether the working directory is still there: it can be removed from under a shell."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def _here() -> Path:
    """Return the working directory; where it has been removed, the path that it had."""
    return Path.cwd() if is_there() else Path(os.readlink("/proc/self/cwd").removesuffix(" (deleted)"))


def _absolute(path: str | Path) -> Path:
    return Path(os.path.normpath(_here() / path))


def _nearest(path: Path) -> Path:
    """Return the path itself or the nearest one above it that is there."""
    path = _absolute(path)
    return next(p for p in (path, *path.parents) if os.path.lexists(p))


def _why_unwritable(path: Path) -> str:
    """Write a nameless file, or make a directory where this one would be; return what is in the way, or nothing."""
    there = _nearest(path)
    if not there.is_dir():
        return f"{there} is not a directory"
    if there != _absolute(path):
        try:  # no look at permissions: root has them all, and /proc still takes nothing
            tempfile.TemporaryDirectory(prefix=".slipstream-", dir=there).cleanup()
        except OSError as error:
            return f"{there} cannot be written ({error.strerror or error})"
        return ""
    try:
        with tempfile.TemporaryFile(dir=there) as stream:
            stream.write(b"x")
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _count(path: Path, seconds: float) -> tuple[int, int, bool]:
    """Return number and bytes of the files below ``path``, and whether all were counted in the time."""
    files = size = 0
    end = time.monotonic() + seconds
    pending = [path]
    while pending:
        try:
            with os.scandir(pending.pop()) as entries:
                for entry in entries:
                    if time.monotonic() > end:
                        return files, size, False
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(Path(entry.path))
                    else:
                        files += 1
                        size += 0 if entry.is_symlink() else entry.stat(follow_symlinks=False).st_size
        except OSError:  # removed meanwhile, or not ours to read
            continue
    return files, size, True


def look_at(name: str, path: Path, variable: str, *, seconds: float = 3, count: bool = True) -> dict[str, Any]:
    """Return the state of a directory that need not exist: contents, whether it can be written, room. Makes nothing.

    ``complete`` is False where counting the files took longer than ``seconds``. Sizes are in bytes.
    """
    there = next(p for p in (_nearest(path), *_nearest(path).parents) if p.exists())  # past a link that leads nowhere
    files, size, complete = _count(path, seconds) if count else (0, 0, True)
    why = _why_unwritable(path)
    usage = shutil.disk_usage(there)
    return {
        "name": name,
        "path": str(path),
        "variable": variable,
        "exists": os.path.isdir(path),
        "files": files,
        "bytes": size,
        "complete": complete,
        "writable": not why,
        "why_not": why,
        "executable": not os.statvfs(there).f_flag & getattr(os, "ST_NOEXEC", 0),
        "free_bytes": usage.free,
        "total_bytes": usage.total,
        "filesystem": there.stat().st_dev,
    }


def working_directory() -> dict[str, Any]:
    """Return the state of the working directory, as ``look_at`` does; it may have been removed."""
    found = look_at("working directory", _here(), "", count=False)
    if not is_there():
        found.update(exists=False, writable=False, why_not="it has been removed since this shell went there")
    return found


def shared_memory(path: Path = Path("/dev/shm")) -> dict[str, Any] | None:
    """Return size and free room of the shared memory in bytes; None where there is none."""
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return None
    return {"path": str(path), "total_bytes": usage.total, "free_bytes": usage.free}


def compiler() -> dict[str, Any]:
    """Return the C compiler that Triton would call for its launchers, and Python's header that they include."""
    command = os.environ.get("CC") or next((name for name in ("gcc", "clang") if shutil.which(name)), "gcc")
    headers = Path(sysconfig.get_paths()["include"], "Python.h")
    return {"command": command, "path": shutil.which(command), "headers": str(headers) if headers.is_file() else None}


def driver(kernel: Path = Path("/proc/driver/nvidia/version")) -> dict[str, Any] | None:
    """Return the NVIDIA driver's version and the newest CUDA that it runs (None: not told); None without a driver.

    ``kernel``: where the kernel tells the version, for containers that have the driver but not its tool.
    """
    try:
        said = subprocess.run(
            ["nvidia-smi"], capture_output=True, text=True, timeout=30, stdin=subprocess.DEVNULL, check=False
        ).stdout
    except (OSError, subprocess.SubprocessError):
        said = ""
    version, cuda = re.search(r"Driver Version:\s*([\d.]+)", said), re.search(r"CUDA[ \w]* Version:\s*([\d.]+)", said)
    if version is None:
        try:
            text = kernel.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None
        version = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", text)
    return {"version": version[1] if version else None, "cuda": cuda[1] if cuda else None}
