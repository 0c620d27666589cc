"""``slipstream doctor``: what is installed here, what of it is unsafe, what is done about that, and what will bite.

Nothing is looked up in a table of versions: each hazard is provoked in a fresh process, as it is and after
``install``. Works without GPU, Triton or FLA; a package that cannot be imported is a finding like another.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import platform
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream import __version__
from slipstream.compilation import doctor_places as places
from slipstream.compilation.doctor_interview import Answer, Interview
from slipstream.compilation.doctor_judge import judge
from slipstream.compilation.doctor_probe import HAZARD_NAMES, INSTALLED_QUESTIONS, PACKAGE_QUESTIONS
from slipstream.compilation.safety import HAZARDS

if TYPE_CHECKING:
    from rich.console import Console

# Raised when a key changes its meaning or goes; new keys may come without.
SCHEMA = 1


def examine(slipstream_cache: Path, *, seconds: float = 180) -> dict[str, Any]:
    """Return what is found here as one JSON object; ``problems`` will bite, ``notes`` will not, ``ok``: no problems.

    ``slipstream_cache``: where Slipstream keeps its own. ``seconds``: how long a question may go unanswered. Three
    fresh processes are asked at once; this one imports no torch. Raises CompilationError where none can be started.
    """
    # A cache that cannot be used is one finding. Torch fails in many places for it; none of them is at fault.
    ask = functools.partial(Interview, seconds=seconds, own_directories=places.unusable(slipstream_cache))
    with (
        ask("packages", PACKAGE_QUESTIONS) as packages,
        ask("stock", HAZARD_NAMES) as stock,
        ask("installed", INSTALLED_QUESTIONS) as installed,
    ):
        around = _surroundings(slipstream_cache)
        asked, before, after = packages.answers(), stock.answers(), installed.answers()
    facts = {
        "python": {
            "version": platform.python_version(),
            "executable": sys.executable,
            "platform": platform.platform(),
        },
        "packages": _packages(asked),
        "driver": around.pop("driver"),
        "gpus": asked["gpus"].get("gpus", []),
        "peers": asked["gpus"].get("peers", []),
        "no_gpu": asked["gpus"].get("no_gpu", asked["gpus"].get("failed", "")),
        "compile": {"compiled": False, "failed": "", **asked["compile"]},
        "hazards": [_hazard(name, before[name], after[name]) for name in HAZARD_NAMES],
        "verify": _verdict(after["verify"]),
        **around,
    }
    problems, notes = judge(facts)
    return {
        "schema": SCHEMA,
        "slipstream": __version__,
        "ok": not problems,
        "problems": problems,
        "notes": notes,
        **facts,
    }


def doctor(*, console: Console, as_json: bool, slipstream_cache: Path) -> int:
    """Show what ``examine`` finds, as tables or as one JSON object; return 1 where something will bite, else 0."""
    if as_json:
        found = examine(slipstream_cache)
        print(json.dumps(found, indent=2, ensure_ascii=False), flush=True)
    else:
        from slipstream.compilation.doctor_view import show

        with console.status("provoking each hazard in fresh processes; up to a minute where nothing is cached ..."):
            found = examine(slipstream_cache)
        show(found, console)
    return 0 if found["ok"] else 1


def _surroundings(slipstream_cache: Path) -> dict[str, Any]:
    return {
        "driver": places.driver(),
        "environment": places.environment(),
        "compiler": places.compiler(),
        "caches": [places.look_at(*place) for place in places.cache_places(slipstream_cache)],
        "working_directory": places.working_directory(),
        "shared_memory": places.shared_memory(),
    }


def _distribution(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _wanted_triton() -> str | None:
    """Return the version of Triton that torch asks for; None where it asks for none, as a CPU build does."""
    try:
        asked = importlib.metadata.requires("torch") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((m[1] for line in asked if (m := re.match(r"(?:pytorch-)?triton\s*==\s*([\w.]+)", line))), None)


def _packages(asked: dict[str, Answer]) -> dict[str, dict[str, Any]]:
    """Return each package's version, and why it cannot be imported (nothing: it can)."""
    found: dict[str, dict[str, Any]] = {
        "torch": {"version": _distribution("torch"), "git_commit": None, "cuda": None, "failed": "", **asked["torch"]},
        "triton": {"version": _distribution("triton"), "wanted": _wanted_triton(), "failed": "", **asked["triton"]},
        "flash-linear-attention": {"version": _distribution("flash-linear-attention"), "failed": ""},
        "fla-core": {"version": _distribution("fla-core"), "failed": ""},
        "transformers": {"version": _distribution("transformers"), "failed": "", **asked["transformers"]},
    }
    # Both bring the package fla, or parts of it; the core is what is imported first.
    home = "fla-core" if found["fla-core"]["version"] else "flash-linear-attention"
    found[home]["failed"] = asked["fla"]["failed"]
    found[home]["version"] = found[home]["version"] or asked["fla"].get("version")
    return found


def _hazard(name: str, stock: Answer, after: Answer) -> dict[str, Any]:
    """Return what was seen of a hazard: stock, and after ``install``; ``held``: it can do no harm then."""
    hazard = next(h for h in HAZARDS if h.name == name)
    status = after.get("status", "not known")
    return {
        "name": name,
        "what": hazard.what,
        # inductor's kernels are Triton's: without it there are none
        "package": "triton" if name == "inductor-autotuner" else hazard.module.split(".")[0],
        "stock": stock.get("status", "not known"),
        "stock_detail": stock.get("detail", stock.get("failed", "")),
        "installed": status,
        "installed_detail": after.get("detail", after.get("failed", "")),
        "seen": after.get("seen", ""),
        "held": status == "not installed" or (status in ("handled", "safe upstream") and not after.get("seen")),
    }


def _verdict(answer: Answer) -> dict[str, Any]:
    detail = answer.get("failed", "") or answer.get("seen", "")
    return {"held": not detail, "detail": detail}
