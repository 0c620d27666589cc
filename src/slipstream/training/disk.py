"""Room on the disk: how much there is, how much a run needs, and sizes in words."""

from __future__ import annotations

import shutil
from pathlib import Path

from slipstream.errors import TrainingError

MIB, GIB = 2**20, 2**30


def size_words(size: int) -> str:
    """Return ``1.25 GiB``, or MiB below a tenth of one, with as many digits as tell it from nothing."""
    if size >= GIB / 10:
        return f"{size / GIB:.2f} GiB"
    return f"{size / MIB:.1f} MiB" if size >= MIB else f"{size / MIB:.3f} MiB"


def free_bytes(path: Path) -> int:
    """Return the bytes free on the disk of ``path``, or where it would be made. Raises OSError."""
    path = path.absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free


def require_room(directory: Path, parameters: int, state: int) -> None:
    """Raise TrainingError unless the run's disk holds one checkpoint and the trained drafter.

    A checkpoint is the weights in float32 and ``state`` bytes of the optimizer; ``drafter/`` is the weights once more.
    """
    needed = 2 * 4 * parameters + state
    try:
        free = free_bytes(directory)
    except OSError:
        return  # the directory cannot be looked at: making it says why
    if needed > free:
        raise TrainingError(
            f"run.directory {directory} needs {size_words(needed)} for a checkpoint and the drafter, but "
            f"{size_words(free)} are free on its disk; make room, or choose another with --run.directory"
        )
