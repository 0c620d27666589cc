"""What ran, where and from which sources: the contents of ``run.json``, and the atomic write that every record uses."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import secrets
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from slipstream import __version__

PACKAGES = ("torch", "transformers", "triton", "safetensors", "tokenizers", "datasets", "numpy")


def new_run_id() -> str:
    """Return an identifier that sorts by time and is unique: ``20261130-041502-9f3a1c``."""
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"


def utc_now() -> str:
    """Return the time in UTC, to the second, in ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def sync_directory(directory: Path) -> None:
    """Make renames and new names in ``directory`` survive a power cut."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace ``path`` as a whole or not at all; the content is on the disk before the name is.

    Raises OSError, and then leaves no half file: neither under ``path`` nor beside it.
    """
    data = content.encode("utf-8") if isinstance(content, str) else content
    if path.exists() and not path.is_file():  # a device, a pipe: a rename would take its place
        with open(path, "wb") as stream:
            stream.write(data)
        return
    aside = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(3)}.tmp")
    try:
        with open(aside, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(aside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def write_json(path: Path, payload: Any) -> None:
    """Write JSON atomically, indented, with a final newline. Raises OSError, or ValueError for nan and infinity."""
    write_atomically(path, json.dumps(payload, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def plain(value: Any) -> Any:
    """Return the value as JSON would give it back (tuples become lists)."""
    return json.loads(json.dumps(value))


def package_versions() -> dict[str, str | None]:
    """Return the installed version of each package that a result depends on; None where it is absent."""
    versions: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return {"slipstream": __version__, "python": platform.python_version(), **versions}


def _output(command: Sequence[str], directory: Path | None = None) -> str | None:
    """Return a command's stripped output, or None where it is missing, fails or hangs."""
    try:
        done = subprocess.run(
            command, cwd=directory, capture_output=True, text=True, timeout=10, stdin=subprocess.DEVNULL, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def git_state(directory: Path) -> dict[str, Any] | None:
    """Return ``{"commit", "modified"}`` of the repository of ``directory``; None without a commit."""
    commit = _output(["git", "rev-parse", "--verify", "HEAD"], directory)
    if not commit:
        return None
    status = _output(["git", "status", "--porcelain", "--untracked-files=no"], directory)
    return {"commit": commit, "modified": None if status is None else bool(status)}


def torch_build() -> dict[str, Any]:
    """Return torch's version, the git commit that it was built from, and its CUDA version (None for a CPU build)."""
    import torch

    return {"version": torch.__version__, "git_commit": torch.version.git_version, "cuda": torch.version.cuda}


def gpu_description(device: str) -> dict[str, Any] | None:
    """Return name, memory in bytes, compute capability and driver of a ``cuda`` device; None for any other."""
    import torch

    if not device.startswith("cuda"):
        return None
    properties = torch.cuda.get_device_properties(torch.device(device))
    driver = _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    return {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "capability": f"{properties.major}.{properties.minor}",
        "driver": driver.splitlines()[0] if driver else None,
    }


def session_record(argv: Sequence[str], *, device: str) -> dict[str, Any]:
    """Describe this process: argv, directory and its git commit, versions, host, GPU, threads, start (UTC)."""
    import torch

    return {
        "argv": list(argv),
        "started": utc_now(),
        "working_directory": str(Path.cwd()),
        "git": git_state(Path.cwd()),
        "versions": package_versions(),
        "torch": torch_build(),
        "executable": sys.executable,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "platform": platform.platform(),
        "device": device,
        "gpu": gpu_description(device),
        "threads": torch.get_num_threads(),
    }


def start_record(
    argv: Sequence[str],
    *,
    seed: int,
    device: str,
    run_id: str | None = None,
    identity: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the contents of a new run's ``run.json``: run id, seeds, this session at the top, and the identity.

    ``identity``: target, tokenizer, data and drafter by name, as in the checkpoints; left out where there is none.
    """
    return {
        "run_id": run_id or new_run_id(),
        "seeds": {"run": seed},
        **session_record(argv, device=device),
        **({} if identity is None else {"identity": plain(identity)}),
        "resumed": [],
    }
