"""Two flags of torch that say "somebody is tracing" for the whole process, made to speak of the thread that asks.

The FX flag: while one thread traces, every other thread's call of a compiled function takes itself for nested in that
trace and raises ("Detected that you are using FX to symbolically trace a dynamo-optimized function"), or runs the plain
function instead. torch has kept it per thread since 2.14.

``torch.compiler.is_compiling``: since 2.13 true in every thread while one of them compiles, so that code which asks it
which way to go takes the way meant for tracing, eagerly: transformers calls flex attention uncompiled then.

A third thing that a trace changes for everybody is ``torch.nn.Module.__call__``: modules of other threads are handed to
the tracer. Here the tracer lets them pass.

Readers are changed through ``__code__``: compiled functions keep references to the reader function from before, which a
new attribute of the module would not reach.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from types import CodeType, ModuleType
from typing import Any

from slipstream.compilation.hazards import Hazard


class _Flags(threading.local):
    fx = False
    compiling = False


flags = _Flags()
_NAME = "_slipstream_flags"
_FX_MODULE = "torch.fx._symbolic_trace"


def _property(module: ModuleType, attribute: str, flag: str) -> None:
    """Make ``module.attribute``, read and written from outside the module, the calling thread's ``flag``."""

    def read(_: ModuleType) -> bool:
        return bool(getattr(flags, flag))

    def write(_: ModuleType, value: bool) -> None:
        setattr(flags, flag, value)

    kind = type(module)
    module.__class__ = type(kind.__name__, (kind,), {attribute: property(read, write)})


# -- bodies that run in torch's own modules, where _slipstream_flags is put in reach ---------------------------------


def _is_fx_tracing() -> bool:
    is_fx_tracing_warning()  # type: ignore[name-defined]  # noqa: F821
    return _slipstream_flags.fx  # type: ignore[name-defined,no-any-return]  # noqa: F821


def _is_fx_symbolic_tracing() -> bool:
    return _slipstream_flags.fx and not torch.compiler.is_compiling()  # type: ignore[name-defined,no-any-return]  # noqa: F821


def _is_compiling() -> bool:
    if torch.jit.is_scripting():  # type: ignore[name-defined]  # noqa: F821
        return False
    return _slipstream_flags.compiling  # type: ignore[name-defined,no-any-return]  # noqa: F821


def _compile_session() -> Any:
    old = _slipstream_flags.compiling  # type: ignore[name-defined]  # noqa: F821
    try:
        _slipstream_flags.compiling = True  # type: ignore[name-defined]  # noqa: F821
        yield
    finally:
        _slipstream_flags.compiling = old  # type: ignore[name-defined]  # noqa: F821


def _names(code: CodeType) -> set[str]:
    return set(code.co_names)


# -- the FX flag -----------------------------------------------------------------------------------------------------


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
    for name, names in expected.items():
        function = getattr(fx, name, None)
        if function is None or _names(function.__code__) != names:
            return f"{_FX_MODULE}.{name} reads other names than known"
    # dynamo wraps the method when it is imported
    trace = inspect.unwrap(fx.Tracer.trace)
    if not hasattr(fx, "_is_fx_tracing_flag") or "_is_fx_tracing_flag" not in _names(trace.__code__):
        return f"{_FX_MODULE}.Tracer.trace does not set _is_fx_tracing_flag"
    return ""


def _fx_apply() -> None:
    fx = _fx()
    setattr(fx, _NAME, flags)
    _property(fx, "_is_fx_tracing_flag", "fx")
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


class _Aside:
    """Runs ``body(inside, leave)`` in a thread of its own and holds it at the place where it calls ``hold``."""

    def __init__(self, body: Any) -> None:
        self.inside, self.leave = threading.Event(), threading.Event()
        self.failure = ""

        def run() -> None:
            try:
                body(self.hold)
            except Exception as error:
                self.failure = f"{type(error).__name__}: {error}"
            finally:
                self.inside.set()

        self.thread = threading.Thread(target=run, daemon=True)

    def hold(self) -> None:
        self.inside.set()
        self.leave.wait(10)

    def __enter__(self) -> _Aside:
        self.thread.start()
        self.inside.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self.leave.set()
        self.thread.join(10)


def _probe(foreign: list[int]) -> Any:
    """Return a tracer that is harmless to other threads' modules and notes which threads' modules it was given."""

    class Probe(_fx().Tracer):  # type: ignore[misc]
        def call_module(self, m: Any, forward: Any, args: Any, kwargs: Any) -> Any:
            foreign.append(threading.get_ident())
            return forward(*args, **kwargs)

        def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: Any) -> Any:
            return attr_val

    return Probe()


def _fx_check() -> str:
    import torch

    fx = _fx()
    if fx.is_fx_symbolic_tracing() or getattr(fx, "_is_fx_tracing_flag", False):
        return "the flag is up in this thread, which traces nothing: it is stuck"
    seen: list[bool] = []

    def body(hold: Any) -> None:
        def traced(x: Any) -> Any:
            seen.append(fx.is_fx_symbolic_tracing())
            hold()
            return x

        _probe([]).trace(traced)

    with _Aside(body) as aside:
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


def _modules_apply() -> None:
    fx = _fx()
    trace = fx.Tracer.trace

    @functools.wraps(trace)
    def trace_own_modules(self: Any, *args: Any, **kwargs: Any) -> Any:
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
    import torch

    foreign: list[int] = []

    def body(hold: Any) -> None:
        def traced(x: Any) -> Any:
            hold()
            return x

        _probe(foreign).trace(traced)

    with _Aside(body) as aside:
        torch.nn.Identity()(torch.zeros(1))
    if aside.failure:
        return f"a trace in another thread failed: {aside.failure}"
    return "a module called in this thread was handed to another thread's tracer" if foreign else ""


# -- is_compiling ----------------------------------------------------------------------------------------------------


def _compiler() -> Any:
    return sys.modules["torch.compiler"]


def _compiling_needed() -> bool:
    return hasattr(_compiler(), "_compile_session_context")


def _compiling_unknown() -> str:
    compiler = _compiler()
    session = getattr(compiler._compile_session_context, "__wrapped__", None)
    if session is None or "_is_compiling_flag" not in _names(session.__code__):
        return "torch.compiler._compile_session_context does not set _is_compiling_flag"
    if _names(compiler.is_compiling.__code__) != {"torch", "jit", "is_scripting", "_is_compiling_flag"}:
        return "torch.compiler.is_compiling reads other names than known"
    return ""


def _compiling_apply() -> None:
    compiler = _compiler()
    setattr(compiler, _NAME, flags)
    _property(compiler, "_is_compiling_flag", "compiling")
    compiler._compile_session_context.__wrapped__.__code__ = _compile_session.__code__
    compiler.is_compiling.__code__ = _is_compiling.__code__


def _compiling_check() -> str:
    compiler = _compiler()
    if not _compiling_needed():
        return ""
    seen: list[bool] = []

    def body(hold: Any) -> None:
        with compiler._compile_session_context():
            seen.append(compiler.is_compiling())
            hold()

    with _Aside(body) as aside:
        here = compiler.is_compiling()
    if aside.failure:
        return f"a compile session in another thread failed: {aside.failure}"
    if seen != [True]:
        return "a thread that compiles is not told so"
    return "another thread's compilation is seen in this one" if here else ""


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
    what="a thread that traces is handed the modules that other threads call",
    module=_FX_MODULE,
    needed=lambda: True,
    unknown=_modules_unknown,
    apply=_modules_apply,
    check=_modules_check,
)
IS_COMPILING = Hazard(
    name="is-compiling",
    what="a thread that compiles makes torch.compiler.is_compiling() true in every other, which then goes dense",
    module="torch.compiler",
    needed=_compiling_needed,
    unknown=_compiling_unknown,
    apply=_compiling_apply,
    check=_compiling_check,
)
