"""The process's own locks. A forked child finds them open; none is ever held across ``.backward()``."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

_made: weakref.WeakSet[Any] = weakref.WeakSet()


def new_lock() -> threading.Lock:
    """Return a lock that is open in a forked child, whoever held it in the parent."""
    lock = threading.Lock()
    _made.add(lock)
    return lock


def new_rlock() -> threading.RLock:
    """Return a reentrant lock that is open in a forked child, unless the thread that forked holds it."""
    lock = threading.RLock()
    _made.add(lock)
    return lock


def open_in_child(lock: Any) -> bool:
    """Open a lock that another thread held when this process was forked from it; say whether one did.

    Only for a process with one thread. A lock that this thread holds stays its own, if it is reentrant.
    """
    if lock.acquire(blocking=False):
        lock.release()
        return False
    lock._at_fork_reinit()
    return True


_guard = new_lock()
_tuning: dict[int, threading.RLock] = {}
_first_call = new_rlock()


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
            lock = _tuning.setdefault(device, new_rlock())
    return lock


def first_call_lock() -> threading.RLock:
    """Return the lock under which the first call of each compiled signature is made, in the whole process."""
    return _first_call


def _open() -> None:
    for lock in list(_made):
        open_in_child(lock)


os.register_at_fork(after_in_child=_open)
