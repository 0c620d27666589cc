"""What a thread that traces with FX does to all others, and how it is kept to itself.

The FX flag: while one thread traces, every other thread's call of a compiled function takes itself for nested in that
trace and raises ("Detected that you are using FX to symbolically trace a dynamo-optimized function"), or runs the plain
function instead. torch has kept it per thread since 2.14.

``torch.nn.Module.__call__`` is the tracer's during a trace: modules of other threads are handed to it. Here the tracer
lets them pass, and there is one trace at a time.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
from typing import Any

from slipstream.compilation.hazards import Hazard
from slipstream.compilation.locks import new_rlock
from slipstream.compilation.thread_flags import NAME, Aside, flags, names, per_thread

_FX_MODULE = "torch.fx._symbolic_trace"
_trace_lock = new_rlock()  # until dynamo is imported
outer_patchers: list[Any] = []  # of the traces that are being made, but for the innermost; None where there was none


def _is_fx_tracing() -> bool:
    is_fx_tracing_warning()  # type: ignore[name-defined]  # noqa: F821
    return _slipstream_flags.fx  # type: ignore[name-defined,no-any-return]  # noqa: F821


def _is_fx_symbolic_tracing() -> bool:
    return _slipstream_flags.fx and not torch.compiler.is_compiling()  # type: ignore[name-defined,no-any-return]  # noqa: F821


def _fx() -> Any:
    return sys.modules[_FX_MODULE]


def _fx_needed() -> bool:
    return not hasattr(_fx(), "_is_fx_tracing_tls")


def _fx_unknown() -> str:
    fx = _fx()
    expected = {
        "is_fx_tracing": {"is_fx_tracing_warning", "_is_fx_tracing_flag"},
        "is_fx_symbolic_tracing": {"_is_fx_tracing_flag", "torch", "compiler", "is_compiling"},
    }
    for name, wanted in expected.items():
        function = getattr(fx, name, None)
        if function is None or names(function.__code__) != wanted:
            return f"{_FX_MODULE}.{name} reads other names than known"
    # dynamo wraps the method when it is imported
    trace = inspect.unwrap(fx.Tracer.trace)
    if not hasattr(fx, "_is_fx_tracing_flag") or "_is_fx_tracing_flag" not in names(trace.__code__):
        return f"{_FX_MODULE}.Tracer.trace does not set _is_fx_tracing_flag"
    return ""


def _fx_apply() -> None:
    fx = _fx()
    setattr(fx, NAME, flags)
    per_thread(fx, "_is_fx_tracing_flag", "fx")
    trace = fx.Tracer.trace

    @functools.wraps(trace)
    def trace_in_this_thread(self: Any, *args: Any, **kwargs: Any) -> Any:
        old, flags.fx = flags.fx, True
        try:
            return trace(self, *args, **kwargs)
        finally:
            flags.fx = old

    fx.Tracer.trace = trace_in_this_thread
    fx.is_fx_tracing.__code__ = _is_fx_tracing.__code__
    fx.is_fx_symbolic_tracing.__code__ = _is_fx_symbolic_tracing.__code__


class _Held(Exception):
    """Ends a probe's trace."""


def _probe(body: Any, given: list[int]) -> Any:
    """Return a tracer whose trace runs ``body()`` and ends before it would patch anything for the process.

    ``given`` notes the threads that handed it a module.
    """

    class Probe(_fx().Tracer):  # type: ignore[misc]
        patches_nothing = True

        def create_args_for_root(self, *_: Any, **__: Any) -> Any:
            body()
            raise _Held

        def call_module(self, m: Any, forward: Any, args: Any, kwargs: Any) -> Any:
            given.append(threading.get_ident())
            return forward(*args, **kwargs)

    return Probe()


def _trace(probe: Any) -> None:
    with contextlib.suppress(_Held):
        probe.trace(lambda x: x)


def _fx_check() -> str:
    import torch

    fx = _fx()
    if fx.is_fx_symbolic_tracing() or getattr(fx, "_is_fx_tracing_flag", False):
        return "the flag is up in this thread, which traces nothing: it is stuck"
    seen: list[bool] = []

    def body(hold: Any) -> None:
        def look() -> None:
            seen.append(fx.is_fx_symbolic_tracing())
            hold()

        _trace(_probe(look, []))

    with Aside(body) as aside:
        here = fx.is_fx_symbolic_tracing()
        attribute = bool(torch.fx._symbolic_trace._is_fx_tracing_flag) if _fx_needed() else False
    if aside.failure:
        return f"a trace in another thread failed: {aside.failure}"
    if seen != [True]:
        return "a thread that traces is not told so"
    return "another thread's trace is seen in this one" if here or attribute else ""


# -- modules of other threads during a trace -------------------------------------------------------------------------


def _modules_unknown() -> str:
    tracer = _fx().Tracer
    missing = [name for name in ("call_module", "getattr", "trace") if not hasattr(tracer, name)]
    return f"{_FX_MODULE}.Tracer has no {missing[0]}" if missing else ""


def trace_lock() -> Any:
    """Return dynamo's compile lock, under which its own traces are made anyway: one lock, not two in two orders.

    A trace patches torch.nn.Module and takes its patches back; two at once leave the other's behind, for ever.
    """
    return getattr(sys.modules.get("torch._dynamo.convert_frame"), "compile_lock", _trace_lock)


def _modules_apply() -> None:
    fx = _fx()
    trace = fx.Tracer.trace

    @functools.wraps(trace)
    def trace_own_modules(self: Any, *args: Any, **kwargs: Any) -> Any:
        lock = trace_lock()
        if getattr(self, "patches_nothing", False):
            # A probe may not wait for a long compilation. Where nobody compiles it shows that traces take the lock.
            self.alone = lock.acquire(blocking=False)
            try:
                return own_modules(self, *args, **kwargs)
            finally:
                if self.alone:
                    lock.release()
        with lock:
            outer_patchers.append(getattr(fx, "CURRENT_PATCHER", None))
            try:
                return own_modules(self, *args, **kwargs)
            finally:
                outer_patchers.pop()

    def own_modules(self: Any, *args: Any, **kwargs: Any) -> Any:
        owner, call_module, get = threading.get_ident(), self.call_module, self.getattr

        def own_call(m: Any, forward: Any, a: Any, k: Any) -> Any:
            return call_module(m, forward, a, k) if threading.get_ident() == owner else forward(*a, **k)

        def own_getattr(attr: str, value: Any, cache: Any) -> Any:
            return get(attr, value, cache) if threading.get_ident() == owner else value

        before = {n: self.__dict__[n] for n in ("call_module", "getattr") if n in self.__dict__}
        self.call_module, self.getattr = own_call, own_getattr
        try:
            return trace(self, *args, **kwargs)
        finally:
            for name in ("call_module", "getattr"):
                del self.__dict__[name]
            self.__dict__.update(before)

    fx.Tracer.trace = trace_own_modules


def _modules_check() -> str:
    given: list[int] = []
    probes: list[Any] = []

    def body(hold: Any) -> None:
        probes.append(_probe(hold, given))
        _trace(probes[0])

    with Aside(body) as aside:
        # What a module of this thread does during that trace: torch.nn.Module.__call__ is the tracer's then.
        result = probes[0].call_module(None, lambda x: x + 1, (1,), {}) if probes else None
        alone = getattr(probes[0], "alone", None) if probes else False
        if held := bool(alone) and trace_lock().acquire(blocking=False):
            trace_lock().release()
    if aside.failure:
        return f"a trace in another thread failed: {aside.failure}"
    if alone is None or held:
        return "two threads can trace at once, which corrupts nn.Module"
    return "a module called in this thread was handed to another thread's tracer" if given or result != 2 else ""


FX_FLAG = Hazard(
    name="fx-flag",
    what="a thread that traces makes every other thread's compiled call raise, or run uncompiled",
    module=_FX_MODULE,
    needed=_fx_needed,
    unknown=_fx_unknown,
    apply=_fx_apply,
    check=_fx_check,
)
FX_MODULES = Hazard(
    name="fx-modules",
    what="a thread that traces is handed the modules that other threads call; two traces at once corrupt nn.Module",
    module=_FX_MODULE,
    needed=lambda: True,
    unknown=_modules_unknown,
    apply=_modules_apply,
    check=_modules_check,
)
