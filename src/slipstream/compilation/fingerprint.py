"""What compiled code depends on: the machine and libraries that made it, and the shapes that it was made for.

The version string alone is not enough: two wheels of one version may come from different commits, and code that one
compiled is no good to the other.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import platform
import subprocess
from collections.abc import Mapping
from functools import cache
from typing import Any

from slipstream.config import Recipe

Fields = dict[str, Any]


def environment(device: Any) -> Fields:
    """Return where code for a ``torch.device`` is made, by name: torch and its commit, CUDA, Triton, FLA, Python, GPU
    with capability and driver. None stands for what is absent. Thread-safe."""
    import torch

    device = torch.device(device)
    fields: Fields = {
        "torch": torch.__version__,
        "torch commit": torch.version.git_version,
        "cuda": torch.version.cuda,
        "triton": _version("triton", "pytorch-triton"),
        "fla": _version("fla-core", "flash-linear-attention"),
        "python": ".".join(platform.python_version_tuple()[:2]),
        "machine": platform.machine(),
        "gpu": None,
        "capability": None,
        "driver": None,
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        fields |= {
            "gpu": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "driver": _driver(),
        }
    return fields


def work(
    recipe: Recipe, drafter: Any, *, target_digest: str, row_length: int, precision: Any, attention: str, device: Any
) -> Fields:
    """Return what a run compiles, by name, in plain values.

    ``recipe``: with its anchors resolved; ``drafter``: the drafter's configuration, a dataclass; ``precision``: the
    drafter's compute dtype; ``attention``: flex or dense; ``device``: with its index, which compiled graphs name.
    """
    fields = {
        "target": target_digest,
        "target.dtype": recipe.target.dtype,
        "target.attention": recipe.target.attention,
        "target.packing": recipe.target.packing,
        "rows": recipe.training.rows,
        "row length": row_length,
        "anchors": recipe.training.anchors,
        "precision": str(precision).removeprefix("torch."),
        "attention": attention,
        "device": str(device),
        **{f"drafter.{name}": value for name, value in dataclasses.asdict(drafter).items()},
    }
    plain: Fields = json.loads(json.dumps(fields))  # as a header gives it back: tuples become lists
    return plain


def digest(fields: Mapping[str, Any]) -> str:
    """Return twelve hexadecimal digits that stand for the fields."""
    return hashlib.sha256(json.dumps(dict(fields), sort_keys=True).encode()).hexdigest()[:12]


def differences(here: Mapping[str, Any], there: Mapping[str, Any]) -> list[str]:
    """Return, for each field that differs, its name and both values: ``torch commit is A here, B there``."""
    names = [*here, *(name for name in there if name not in here)]
    return [
        f"{name} is {here.get(name)} here, {there.get(name)} there"
        for name in names
        if here.get(name) != there.get(name)
    ]


def _version(*packages: str) -> str | None:
    for package in packages:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


@cache
def _driver() -> str | None:
    """Return the driver's release; None where it cannot be asked. Once a process: asking may take a second."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=10, stdin=subprocess.DEVNULL, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.split("\n")[0].strip() or None if done.returncode == 0 else None
