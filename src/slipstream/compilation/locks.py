"""The process's own locks. Forked children get fresh ones; none is ever held across ``.backward()``."""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from typing import Any

_guard = threading.Lock()
_tuning: defaultdict[int, threading.RLock] = defaultdict(threading.RLock)
_first_call = threading.RLock()


def current_device() -> int:
    """Return the calling thread's CUDA device, or -1 without one."""
    import torch

    return torch.cuda.current_device() if torch.cuda.is_initialized() else -1


PROBE = -2  # no device: what only a check tunes, so that it waits for no real tuning
DEVICE = "_slipstream_device"  # attribute of a check's own tuner: PROBE


def tuning_device(tuner: Any) -> int:
    """Return where a tuner tunes: the calling thread's device, or what a check has set on it."""
    device: int | None = tuner.__dict__.get(DEVICE)
    return current_device() if device is None else device


def tuning_lock(device: int) -> threading.RLock:
    """Return the lock under which kernels are tuned on a device: timings disturb each other."""
    lock = _tuning.get(device)
    if lock is None:
        with _guard:
            lock = _tuning[device]
    return lock


def first_call_lock() -> threading.RLock:
    """Return the lock under which the first call of each compiled signature is made, in the whole process."""
    return _first_call


def _fresh() -> None:
    global _guard, _first_call
    _guard = threading.Lock()
    _first_call = threading.RLock()
    _tuning.clear()


os.register_at_fork(after_in_child=_fresh)
