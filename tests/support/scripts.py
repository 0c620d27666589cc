"""The scripts that make what ships with the package; they are no package themselves."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).resolve().parents[2] / "scripts" / "embedded_target"


def load(name: str) -> ModuleType:
    """Import one of the scripts; they import one another by bare name, as they do when run."""
    sys.path.insert(0, str(FOLDER))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(FOLDER))
