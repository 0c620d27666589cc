"""``torch.compiler.is_compiling()`` that speaks of the thread that asks.

Since torch 2.13 it is true in every thread while one of them compiles. Code that asks it which way to go then takes the
way meant for tracing, eagerly: transformers calls flex attention uncompiled.
"""

from __future__ import annotations

import sys
from typing import Any

from slipstream.compilation.hazards import Hazard
from slipstream.compilation.thread_flags import NAME, Aside, flags, names, per_thread


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


def _compiler() -> Any:
    return sys.modules["torch.compiler"]


def _compiling_needed() -> bool:
    return hasattr(_compiler(), "_compile_session_context")


def _compiling_unknown() -> str:
    compiler = _compiler()
    session = getattr(compiler._compile_session_context, "__wrapped__", None)
    if session is None or "_is_compiling_flag" not in names(session.__code__):
        return "torch.compiler._compile_session_context does not set _is_compiling_flag"
    if names(compiler.is_compiling.__code__) != {"torch", "jit", "is_scripting", "_is_compiling_flag"}:
        return "torch.compiler.is_compiling reads other names than known"
    return ""


def _compiling_apply() -> None:
    compiler = _compiler()
    setattr(compiler, NAME, flags)
    per_thread(compiler, "_is_compiling_flag", "compiling")
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

    with Aside(body) as aside:
        here = compiler.is_compiling()
    if aside.failure:
        return f"a compile session in another thread failed: {aside.failure}"
    if seen != [True]:
        return "a thread that compiles is not told so"
    return "another thread's compilation is seen in this one" if here else ""


IS_COMPILING = Hazard(
    name="is-compiling",
    what="a thread that compiles makes torch.compiler.is_compiling() true in every other, which then goes dense",
    module="torch.compiler",
    needed=_compiling_needed,
    unknown=_compiling_unknown,
    apply=_compiling_apply,
    check=_compiling_check,
)
