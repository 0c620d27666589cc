"""``install``: make compilation and autotuning safe under threads. ``verify``: see that they are."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

from slipstream.compilation import forks
from slipstream.compilation.annotations import ANNOTATIONS
from slipstream.compilation.autotune import AUTOTUNER
from slipstream.compilation.compiling_flag import IS_COMPILING
from slipstream.compilation.dense import DENSE_FLEX
from slipstream.compilation.fx_trace import FX_FLAG, FX_MODULES, trace_lock
from slipstream.compilation.hazards import Hazard, Report, State, Status
from slipstream.compilation.hooks import installed, when_imported
from slipstream.compilation.inductor import INDUCTOR_AUTOTUNER
from slipstream.compilation.locks import new_rlock
from slipstream.compilation.lowering import LAZY_BACKWARD, THREAD_CONFIG, share
from slipstream.compilation.tensor_cache import TENSOR_CACHE
from slipstream.errors import CompilationError

# The order matters in one place: the flag's wrapper of Tracer.trace before that of the modules.
HAZARDS: tuple[Hazard, ...] = (
    FX_FLAG,
    FX_MODULES,
    IS_COMPILING,
    ANNOTATIONS,
    LAZY_BACKWARD,
    THREAD_CONFIG,
    AUTOTUNER,
    INDUCTOR_AUTOTUNER,
    TENSOR_CACHE,
    DENSE_FLEX,
)

# Threads that import these for the first time at once meet them half-imported, or torch's own import deadlock.
_IMPORTED_FIRST = (
    "torch._functorch.config",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.nn.attention.flex_attention",
)

_lock = new_rlock()
_installing = new_rlock()
_states: dict[str, State] = {}
_asked = False
_allow_unknown = False


def install(*, allow_unknown: bool = False) -> Report:
    """Make safe what this installation's torch, Triton and FLA do not; return what was found and done.

    Idempotent and thread-safe; call it before or after any of them is imported, at any time, in any thread. torch,
    dynamo and inductor are imported; Triton and FLA are made safe when they are. Feature tests decide, not version
    numbers: what is safe upstream is left alone. Settings of torch that the calling thread has assigned become every
    thread's.

    Raises CompilationError for a version whose code is not as the fix expects, naming it; with ``allow_unknown`` that
    hazard is left open and reported as unknown.
    """
    global _asked, _allow_unknown
    # No state lock is held here: an import may be waited for, and hooks that run inside imports take that lock.
    with _installing:
        _allow_unknown = _allow_unknown or allow_unknown
        for name in _IMPORTED_FIRST:
            importlib.import_module(name)
        # Not while another thread compiles: it would be told in the middle of it that it does not.
        with trace_lock():
            for hazard in HAZARDS:
                _install(hazard)
            share()
        forks.watch()
        _asked = True
    found = report()
    _refuse_unknown(found)
    return found


def _install(hazard: Hazard) -> None:
    with _lock:
        state = _states.get(hazard.name)
        if state is not None and state.status not in ("not installed", "unknown"):
            return
        there = installed(hazard.module.split(".")[0]) and (hazard is not INDUCTOR_AUTOTUNER or installed("triton"))
        _states[hazard.name] = State(hazard.name, "not imported yet" if there else "not installed")
    if there:
        when_imported(hazard.module, _Handle(hazard))


def _refuse_unknown(found: Report) -> None:
    unknown = [s for s in found.states if s.status == "unknown"]
    if unknown and not _allow_unknown:
        raise CompilationError(
            "compilation under threads could not be made safe: "
            + "; ".join(f"{s.name}: {s.detail}" for s in unknown)
            + "; use a version that is supported, or allow it at your own risk (run.allow_unknown_versions = true; "
            "install(allow_unknown=True))"
        )


class _Handle:
    """Handles one hazard when its module has been imported."""

    def __init__(self, hazard: Hazard) -> None:
        self.hazard = hazard

    def __call__(self, _: ModuleType) -> None:
        hazard = self.hazard
        with _lock:
            try:
                _states[hazard.name] = State(hazard.name, *self._do())
            except Exception as error:  # what it looks for is not there: this runs inside somebody's import
                why = f"{hazard.module} is not as known ({type(error).__name__}: {error})"
                _states[hazard.name] = State(hazard.name, "unknown", why)

    def _do(self) -> tuple[Status, str]:
        hazard = self.hazard
        if not hazard.needed():
            return "safe upstream", ""
        if why := hazard.unknown():
            return "unknown", why
        hazard.apply()
        return "handled", ""


def report() -> Report:
    """Return what the last ``install`` knows; empty before it."""
    with _lock:
        return Report(tuple(_states[h.name] for h in HAZARDS if h.name in _states))


def _is_imported(name: str) -> bool:
    module = sys.modules.get(name)
    return module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False)


def verify() -> Report:
    """Provoke each hazard in the calling thread and see that it does no harm; a few milliseconds. Thread-safe.

    Call it at the start of every thread that trains, after all imports, and between steps. It finds what was never
    installed, what a later import has overwritten, and a flag that is stuck. Returns the report; raises
    CompilationError naming every hazard that is not held.
    """
    if not _asked:
        with _installing:  # another thread may be about it
            pass
    if not _asked:
        raise CompilationError("slipstream.compilation.install() has not been called in this process; call it first")
    failures = []
    found = report()
    _refuse_unknown(found)  # a library that was imported after install() may be unknown to it
    for hazard in HAZARDS:
        state = found[hazard.name]
        if state.status == "not imported yet" and _is_imported(hazard.module):
            failures.append(f"{hazard.name}: {hazard.module} was imported without being noticed")
        if state.status in ("handled", "safe upstream"):  # unknown: the user allowed it
            seen = hazard.check()
            if seen:
                failures.append(f"{hazard.name}: {seen}")
    if failures:
        raise CompilationError(
            f"compilation under threads is not safe: {'; '.join(failures)}. Something was patched over it: look for "
            "other patches of torch, Triton or FLA in this process, and remove them"
        )
    return report()
