"""A forked child finds the process's own locks open, but for those that its only thread holds itself."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from slipstream.compilation.locks import new_lock, new_rlock


def forked(body: Callable[[], bool]) -> bool:
    child = os.fork()
    if not child:
        try:
            os._exit(0 if body() else 1)
        except BaseException:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def taken(lock: threading.Lock | threading.RLock) -> bool:
    """Whether another thread gets the lock."""
    got: list[bool] = []

    def take() -> None:
        got.append(lock.acquire(timeout=0.5))
        if got[0]:
            lock.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return got[0]


def test_what_another_thread_holds_is_open_in_the_child_only() -> None:
    locks = new_lock(), new_rlock()
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with locks[0], locks[1]:
            held.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(60)
    try:
        assert forked(lambda: all(map(taken, locks)))
        assert not any(map(taken, locks))
    finally:
        done.set()
        thread.join()
    assert all(map(taken, locks))


def test_what_the_forking_thread_holds_stays_its_own() -> None:
    lock = new_rlock()

    def body() -> bool:
        closed = not taken(lock)
        lock.release()
        return closed and taken(lock)

    with lock:
        assert forked(body)
    assert taken(lock)
