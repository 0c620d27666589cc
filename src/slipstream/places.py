"""Where files that can be made again are kept."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def cache_directory() -> Path:
    """Return where derived files are kept: ``SLIPSTREAM_CACHE`` or ``~/.cache/slipstream``. It may not exist yet.

    A user without a home, as containers have them, gets a directory among the temporary ones.
    """
    if given := os.environ.get("SLIPSTREAM_CACHE"):
        return Path(given)
    try:
        return Path.home() / ".cache" / "slipstream"
    except RuntimeError:
        return Path(tempfile.gettempdir()) / f"slipstream-{os.getuid()}"
