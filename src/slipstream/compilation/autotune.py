"""Triton's autotuner (and FLA's, which is built on it) when several threads launch the same kernel.

The tuner keeps the arguments of the call that is being tuned in ``nargs``, and copies of tensors that a kernel changes
in ``restore_copies``, on itself: a second thread overwrites them, or clears them at its end. The first then fails with
"'NoneType' object is not a mapping", or restores the other's tensors, silently.

Here both belong to the calling thread. Threads that meet one key untuned share the work: each configuration is timed
once, one at a time on a device, and all get the same timings. A tuned kernel takes no lock.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import weakref
from typing import Any

from slipstream.compilation.hazards import Hazard
from slipstream.compilation.locks import DEVICE, PROBE, new_lock, tuning_device, tuning_lock

_MODULE = "triton.runtime.autotuner"
_SHARED = "_slipstream_shared"


class _Local(threading.local):
    """A thread-local that copies and pickles as an empty one, since tuners are copied."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (_Local, ())


class _Shared:
    """What threads that tune the same keys have in common.

    timings: by place, which is (device, key), then by configuration; threads: those that tune there now.
    """

    def __init__(self) -> None:
        self.lock = new_lock()
        self.timings: dict[tuple[Any, ...], dict[Any, Any]] = {}
        self.threads: dict[tuple[Any, ...], set[int]] = {}
        _everywhere.add(self)

    def leave(self, place: tuple[Any, ...], *threads: int) -> None:
        """Threads tune there no more; what the last one leaves behind goes."""
        self.threads[place].difference_update(threads)
        if not self.threads[place]:
            del self.threads[place], self.timings[place]

    def __reduce__(self) -> tuple[Any, ...]:
        return (_Shared, ())


_everywhere: weakref.WeakSet[_Shared] = weakref.WeakSet()


def _alone_in_child() -> None:
    """Forget the threads of the process that this one was forked from."""
    for shared in list(_everywhere):
        for place, threads in list(shared.threads.items()):
            shared.leave(place, *(threads - {threading.get_ident()}))


class PerThread:
    """A data descriptor: an attribute that each thread has for itself; ``default()`` before it is set."""

    def __init__(self, name: str, default: Any) -> None:
        self.name, self.default = name, default
        self.slot = f"_slipstream_{name}"

    def __set__(self, tuner: Any, value: Any) -> None:
        own = tuner.__dict__
        local = own.get(self.slot)
        if local is None:
            local = own.setdefault(self.slot, _Local())
        local.value = value

    def __get__(self, tuner: Any, owner: Any = None) -> Any:
        if tuner is None:
            return self
        try:
            return tuner.__dict__[self.slot].value
        except (KeyError, AttributeError):
            # Its own attribute is that of a launch which was under way when this came into force.
            return tuner.__dict__[self.name] if self.name in tuner.__dict__ else self.default()


def tuning_key(tuner: Any, kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return the key under which the tuner will keep its choice for the calling thread's arguments."""
    given = {k: v for k, v in {**(tuner.nargs or {}), **kwargs}.items() if k in tuner.arg_names}
    key = [given[k] for k in tuner.keys if k in given]
    key += [str(v.dtype) for v in given.values() if hasattr(v, "dtype")]
    return tuple(key)


def _tuner() -> Any:
    return sys.modules[_MODULE].Autotuner  # type: ignore[attr-defined]


def _needed() -> bool:
    # Where the arguments are no longer kept on the tuner, there is nothing to share.
    return "nargs" in _tuner().run.__code__.co_names or hasattr(_tuner().run, "__wrapped__")


def _unknown() -> str:
    tuner = _tuner()
    for name, wanted in (("run", {"nargs", "cache", "keys", "arg_names"}), ("_bench", {"nargs", "do_bench"})):
        function = getattr(tuner, name, None)
        if function is None or not wanted <= set(_all_names(function.__code__)):
            return f"{_MODULE}.Autotuner.{name} does not use {', '.join(sorted(wanted))}"
    return ""


def _all_names(code: Any) -> set[str]:
    found = set(code.co_names) | set(code.co_freevars)
    for constant in code.co_consts:
        if hasattr(constant, "co_names"):
            found |= _all_names(constant)
    return found


class _TunedMeanwhile(BaseException):
    """Ends a tuning before its first timing: another thread has just tuned that key. Never leaves ``run``."""


def _runs(tuner: Any, run: Any) -> bool:
    """Whether the calling thread is in the tuner's ``run``; ``_bench`` may be called from elsewhere as well."""
    frame: Any = sys._getframe(1)
    while frame is not None and not (frame.f_code is run.__code__ and frame.f_locals["self"] is tuner):
        frame = frame.f_back
    return frame is not None


def _apply() -> None:
    tuner = _tuner()
    run, bench = tuner.run, tuner._bench
    tuner.nargs = PerThread("nargs", lambda: None)
    tuner.restore_copies = PerThread("restore_copies", dict)
    mark = PerThread("tuning", lambda: None)

    @functools.wraps(run)
    def run_in_this_thread(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            try:
                return run(self, *args, **kwargs)
            except _TunedMeanwhile:
                return run(self, *args, **kwargs)  # finds the choice in the cache
        finally:
            if _SHARED in self.__dict__ and (place := mark.__get__(self)) is not None:
                mark.__set__(self, None)
                shared = self.__dict__[_SHARED]
                with shared.lock:
                    shared.leave(place, threading.get_ident())

    @functools.wraps(bench)
    def bench_once(self: Any, *args: Any, config: Any, **meta: Any) -> Any:
        device = tuning_device(self)
        place = (device, tuning_key(self, meta))
        shared = self.__dict__.setdefault(_SHARED, _Shared())
        if (before := mark.__get__(self)) != place:
            mark.__set__(self, place)
            with shared.lock:
                if before is not None:  # timed by hand, and never run to its end
                    shared.leave(before, threading.get_ident())
                # ``run`` has looked in the cache before. Whoever tuned since has left its choice there, and its
                # timings are gone: to time again would put another choice in place of one that is in use.
                late = place not in shared.threads and place[1] in self.cache
                shared.threads.setdefault(place, set()).add(threading.get_ident())
                shared.timings.setdefault(place, {})
            if late and _runs(self, run_in_this_thread):
                raise _TunedMeanwhile
        timings = shared.timings[place]
        with tuning_lock(device):
            # id: configurations compare by value, and two that are equal may be told apart by their hooks.
            if id(config) not in timings:
                timings[id(config)] = bench(self, *args, config=config, **meta)
            return timings[id(config)]

    tuner.run, tuner._bench = run_in_this_thread, bench_once
    os.register_at_fork(after_in_child=_alone_in_child)


# -- the check: a real tuner over a kernel that is only counted -------------------------------------------------------


class _Kernel:
    """Stands in for a compiled kernel."""

    def __init__(self) -> None:
        def counted(x: Any) -> None:
            """Named by the tuner's messages."""

        self.fn = counted
        self.arg_names = ["x"]

    def run(self, *args: Any, **kwargs: Any) -> None:
        """Launch nothing."""


class _Number:
    """Stands in for a tensor whose value a kernel changes."""

    def __init__(self, value: int) -> None:
        self.value = value

    def clone(self) -> _Number:
        return _Number(self.value)

    def copy_(self, other: _Number) -> None:
        self.value = other.value


def _check() -> str:
    import triton

    inside, leave = threading.Event(), threading.Event()
    benches: list[int] = []

    def do_bench(call: Any, quantiles: Any = None) -> list[float]:
        benches.append(threading.get_ident())
        inside.set()
        leave.wait(10)
        call()
        return [1.0, 1.0, 1.0]

    configs = [triton.Config({}, num_warps=w) for w in (1, 2)]
    tuner = _tuner()(_Kernel(), ["x"], configs, ["x"], None, None, do_bench=do_bench)
    setattr(tuner, DEVICE, PROBE)
    tuner.cache[(2,)] = configs[0]  # what the other call finds tuned
    failures: list[str] = []

    def tune() -> None:
        try:
            tuner.run(1)
        except Exception as error:
            failures.append(f"{type(error).__name__}: {error}")

    first = threading.Thread(target=tune, daemon=True)
    first.start()
    inside.wait(10)
    tuner.run(2)  # a tuned call in this thread, while the other one tunes
    second = threading.Thread(target=tune, daemon=True)
    second.start()
    leave.set()
    for thread in (first, second):
        thread.join(10)
    if failures:
        return f"a launch beside another one failed: {failures[0]}"
    left = tuner.__dict__.get(_SHARED)
    if left is not None and left.threads:
        return "a launch that tuned leaves its timings behind: Autotuner.run is not the one that was installed"
    if len(benches) != len(configs):
        return f"{len(configs)} configurations were timed {len(benches)} times by two threads"
    return _check_restore()


def _check_restore() -> str:
    import triton

    configs = [triton.Config({}, num_warps=w) for w in (1, 2)]
    tuner = _tuner()(_Kernel(), ["x"], configs, ["x"], None, ["x"])
    mine, its = _Number(1), _Number(2)
    tuner.pre_hook({"x": mine})
    other = threading.Thread(target=lambda: tuner.pre_hook({"x": its}))
    other.start()
    other.join()
    mine.value = 3
    tuner.post_hook({"x": mine}, exception=None)
    return "" if mine.value == 1 else "a tensor was restored from another thread's copy"


AUTOTUNER = Hazard(
    name="triton-autotuner",
    what="threads that tune one Triton kernel at once crash, or restore each other's tensors",
    module=_MODULE,
    needed=_needed,
    unknown=_unknown,
    apply=_apply,
    check=_check,
)
