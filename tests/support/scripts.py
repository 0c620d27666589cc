"""Scripts and benchmarks; they are no package themselves."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]


def load(name: str, folder: str = "scripts/embedded_target") -> ModuleType:
    """Import one of the scripts; they import one another by bare name, as they do when run."""
    place = str(ROOT / folder)
    sys.path.insert(0, place)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(place)
