"""The tuner of inductor's own Triton kernels when several threads launch one of them for the first time.

``CachingAutotuner.run`` compiles, tunes and narrows its list of launchers without a lock: each thread tunes for itself,
and one may read the list while another replaces it. Here the first run of a kernel is made by one thread; the others
wait for it. A kernel that has run once takes no lock.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

from slipstream.compilation.hazards import Hazard
from slipstream.compilation.locks import DEVICE, PROBE, tuning_device, tuning_lock

_MODULE = "torch._inductor.runtime.triton_heuristics"
_SETTLED = "_slipstream_settled"


def _tuner() -> Any:
    return sys.modules[_MODULE].CachingAutotuner  # type: ignore[attr-defined]


def _unknown() -> str:
    run = getattr(_tuner(), "run", None)
    if run is None or "launchers" not in run.__code__.co_names:
        return f"{_MODULE}.CachingAutotuner.run does not use launchers"
    return ""


def _apply() -> None:
    tuner = _tuner()
    run = tuner.run

    @functools.wraps(run)
    def first_run_alone(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.__dict__.get(_SETTLED) and len(self.launchers) == 1:
            return run(self, *args, **kwargs)
        with tuning_lock(tuning_device(self)):
            result = run(self, *args, **kwargs)
            self.__dict__[_SETTLED] = True
            return result

    tuner.run = first_run_alone


def _check() -> str:
    """Run a real ``run`` over stubs from two threads: its first part must be passed by one of them only."""
    calls: list[str] = []
    launcher = SimpleNamespace(config=SimpleNamespace(), cache_hash="", store_cubin=False)

    class Stub(_tuner()):  # type: ignore[misc]
        def __init__(self) -> None:
            self.launchers: list[Any] = []
            setattr(self, DEVICE, PROBE)
            self.inductor_meta: dict[str, Any] = {}
            self.triton_meta: dict[str, Any] = {"signature": {}}
            self.fn = SimpleNamespace(__name__="stub")
            self.device_props = SimpleNamespace(type="cpu", index=0)
            self.cpu_kernel_saved = self.cuda_kernel_saved = True
            self.triton_interpret = False
            self.dump_launch_params = self.dump_launch_tensors = False
            self._plugins: list[Any] = []
            self._cached_launcher = None
            self._cache_eligible = False
            self.compile_id = self.is_backward = None
            self.precompile_time_taken_ns = 0

        def precompile(self, *_: Any, **__: Any) -> None:
            calls.append("compiled")
            time.sleep(0.001)  # long enough for the other thread to come by
            self.launchers = [launcher, launcher]

        def autotune_to_one_config(self, *_: Any, **__: Any) -> None:
            calls.append("tuned")
            time.sleep(0.001)
            self.launchers = [self._launch]

        def _pre_launch(self, *_: Any, **__: Any) -> None:
            pass

        def _post_launch(self, *_: Any, **__: Any) -> None:
            pass

        @staticmethod
        def _launch(*_: Any, **__: Any) -> None:
            calls.append("launched")

    for name, value in vars(launcher).items():
        setattr(Stub._launch, name, value)
    stub, start, failures = Stub(), threading.Barrier(2), []

    def launch() -> None:
        start.wait(10)
        try:
            stub.run(stream=0)
        except Exception as error:
            failures.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=launch, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    if calls.count("compiled") > 1 or calls.count("tuned") > 1:
        return f"two threads compiled {calls.count('compiled')} times and tuned {calls.count('tuned')} times"
    return f"a first launch from two threads failed: {failures[0]}" if failures else ""


INDUCTOR_AUTOTUNER = Hazard(
    name="inductor-autotuner",
    what="threads that launch one of inductor's kernels for the first time each tune it, over one list of launchers",
    module=_MODULE,
    needed=lambda: True,
    unknown=_unknown,
    apply=_apply,
    check=_check,
)
