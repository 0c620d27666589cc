"""The pairs that come with the package: a target, data, the drafter that was trained for it, and how that run went.

A pair is a directory here: ``recipe.toml`` (its quickstart), prompts and the target's own answers; where they are
shipped, ``target/``, ``drafter/`` (as a server loads it) and ``run/`` (recipe, metrics and evaluation of the training).
"""

from __future__ import annotations

from pathlib import Path

EMBEDDED, SMOLLM2 = "embedded", "smollm2"

_ROOT = Path(__file__).parent


def pairs() -> tuple[str, ...]:
    """Return the names of the pairs that are there; the first is the quickstart's."""
    return tuple(name for name in (EMBEDDED, SMOLLM2) if (_ROOT / name / "recipe.toml").is_file())


def pair_directory(name: str) -> Path:
    """Return the directory of the pair ``name``; ValueError for a name that is none of ``pairs()``."""
    if name not in pairs():
        raise ValueError(f"{name} is not a pair; the pairs are {', '.join(pairs())}")
    return _ROOT / name


def target_directory(name: str) -> Path | None:
    """Return the directory of a pair's target, or None where it is not shipped (another package holds SmolLM2)."""
    directory = _ROOT / name / "target"
    return directory if (directory / "config.json").is_file() else None


def shipped_drafter(name: str) -> Path | None:
    """Return the directory of a pair's trained drafter, or None where none is shipped."""
    directory = _ROOT / name / "drafter"
    return directory if (directory / "config.json").is_file() else None


def drafter_path(setting: str) -> Path:
    """Return the drafter directory that a setting names: a path, or a pair's name for the drafter shipped with it."""
    shipped = shipped_drafter(setting) if setting in pairs() else None
    return Path(setting) if shipped is None else shipped
