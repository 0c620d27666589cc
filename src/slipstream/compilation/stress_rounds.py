"""One cold round of a stress workload: threads that start at once, and the same work done alone to compare with.

Runs in a child process. A workload hands over ``Cold``; what the round found comes back as ``Round``.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from slipstream.compilation.stress_plan import Round

Body = Callable[[], list[Any]]


@dataclass
class Cold:
    """What the threads of a round do. Results are tensors: outputs, then gradients.

    bodies: one a thread; alone: the same work for the main thread, done after the threads; delays: seconds between the
    common start and a thread's own.
    """

    bodies: list[Body]
    alone: list[Body]
    delays: list[float]


class Workload:
    """What threads can do at once. ``lacking`` is called in the parent, the rest in a child's main thread."""

    name: ClassVar[str]
    device: ClassVar[str]
    rounds_per_process: ClassVar[int] = 50
    uses_flex: ClassVar[bool] = False
    # Relative to the largest value; the work done alone may add in another order.
    tolerance: ClassVar[float] = 1e-5

    def lacking(self) -> str:
        """Return what this machine lacks to run it, or nothing; imports neither torch nor Triton."""
        return ""

    def prepare(self, guard: bool, counts: Counts) -> None:
        """Called once in each process, after ``install`` if the guard is on."""
        self.guard, self.counts = guard, counts

    def cold(self, number: int, seed: int, threads: int) -> Cold:
        """Return a round with cold caches and inputs that depend on (seed, number, thread) only."""
        raise NotImplementedError


class Counts:
    """Dense calls and benches, since the last ``take``. Thread-safe."""

    def __init__(self) -> None:
        self._dense: list[Any] = []
        self._benches: list[Any] = []
        self._alive: list[Any] = []
        self._left_out: dict[str, None] = {}
        self._local = threading.local()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Count no dense calls of the calling thread: ``verify`` makes one to see that it is refused."""
        self._local.paused = True
        try:
            yield
        finally:
            self._local.paused = False

    def watch_flex(self) -> None:
        """Count uncompiled calls of flex attention, whether the guard refuses them or not. Once in a process."""
        from torch.nn.attention import flex_attention as flex

        # Every uncompiled call goes through it, and no compiled one does.
        setup: Any = flex.setup_compilation_env  # type: ignore[attr-defined]

        def counted(*args: Any, **kwargs: Any) -> Any:
            if not getattr(self._local, "paused", False):
                self._dense.append(threading.get_ident())
            return setup(*args, **kwargs)

        flex.setup_compilation_env = counted  # type: ignore[attr-defined]

    def bench(self, tuner: Any, *what: Any) -> None:
        """Count one timing of ``what`` by ``tuner``."""
        self._alive.append(tuner)  # or another one might get its id
        self._benches.append((id(tuner), *what))

    def counting(self, do_bench: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``do_bench`` for Triton's tuner, counted by tuner, device, key and configuration."""

        @functools.wraps(do_bench)
        def counted(*args: Any, **kwargs: Any) -> Any:
            frame: Any = sys._getframe(1)
            while frame is not None and not (frame.f_code.co_name == "_bench" and "config" in frame.f_locals):
                frame = frame.f_back
            if frame is not None:
                tuner, config = frame.f_locals["self"], frame.f_locals["config"]
                # Not tuner.nargs: that is what races spoil.
                given = dict(zip(tuner.arg_names, frame.f_locals["args"], strict=False)) | frame.f_locals["meta"]
                key = [str(given[k]) for k in tuner.keys if k in given]
                key += [str(v.dtype) for k, v in given.items() if k in tuner.arg_names and hasattr(v, "dtype")]
                devices = {str(v.device) for v in given.values() if hasattr(v, "device")}
                self.bench(tuner, *sorted(devices), *key, id(config))
            return do_bench(*args, **kwargs)

        return counted

    def leave_out(self, what: str) -> None:
        """Note what could not be done on this machine, by any number of threads."""
        self._left_out[what] = None

    def take_left_out(self) -> tuple[str, ...]:
        """Return what was left out since the last call."""
        found = tuple(self._left_out)
        self._left_out.clear()
        return found

    def take(self) -> tuple[int, int, int]:
        """Return (dense calls, benches, different benches) and begin anew."""
        dense, benches = len(self._dense), list(self._benches)
        for kept in (self._dense, self._benches, self._alive):
            kept.clear()
        return dense, len(benches), len(set(benches))


def one_line(error: BaseException) -> str:
    """Return type and message, without what differs from one round to the next."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return re.sub(r"0x[0-9a-fA-F]{4,}", "0x...", text)[:300]


def difference(mine: list[Any], alone: list[Any], tolerance: float) -> str:
    """Return in what the results of a thread differ from those of the work done alone, or nothing."""
    if len(mine) != len(alone):
        return f"{len(mine)} results instead of {len(alone)}"
    for place, (a, b) in enumerate(zip(mine, alone, strict=True)):
        if a.shape != b.shape:
            return f"result {place} has shape {list(a.shape)} instead of {list(b.shape)}"
        off = float((a.detach().double() - b.detach().double()).abs().max()) if a.numel() else 0.0
        allowed = tolerance * max(1.0, float(b.detach().double().abs().max())) if b.numel() else 0.0
        if not off <= allowed:  # nan is not
            return f"result {place} is off by {off:g}"
    return ""


def play(work: Cold, *, number: int, enter: Callable[[], None], counts: Counts, tolerance: float) -> Round:
    """Run the threads of a round, then the same work alone, and return what was found.

    ``enter`` is called by each thread before the common start. A thread that hangs hangs this function: the process's
    watchdog ends it.
    """
    began = time.perf_counter()
    start = threading.Barrier(len(work.bodies))
    errors: list[str] = []
    results: dict[int, list[Any]] = {}

    @contextlib.contextmanager
    def noted() -> Iterator[None]:
        try:
            yield
        except Exception as error:
            errors.append(one_line(error))
            traceback.print_exc()  # the parent keeps standard error

    def run(i: int) -> None:
        with noted():
            enter()
        start.wait()
        time.sleep(work.delays[i])
        with noted():  # also where it could not enter: others may go on until this body has ended
            results[i] = work.bodies[i]()

    threads = [threading.Thread(target=run, args=(i,), name=f"stress-{i}") for i in range(len(work.bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    dense, benches, tuned = counts.take()
    wrong = []
    for i, result in sorted(results.items()):
        if seen := difference(result, work.alone[i](), tolerance):
            wrong.append(f"thread {i}: {seen}")
    counts.take()  # what was done alone does not count
    seconds = time.perf_counter() - began
    left_out = counts.take_left_out()
    return Round(number, seconds, tuple(errors), dense, tuple(wrong), benches, tuned, left_out=left_out)
