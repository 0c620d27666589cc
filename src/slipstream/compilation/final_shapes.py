"""After the first step every shape has been seen: whatever is compiled later is an error, or is counted and told.

dynamo is asked at the start of each of its compilations. So a recompilation is met whatever its cause: a shape, a
global or a mode that changed, a module put into evaluation. Warm calls pay nothing for it.
"""

from __future__ import annotations

import logging
import sys
import threading
from types import CodeType
from typing import Any

from slipstream.compilation.locks import new_lock
from slipstream.errors import CompilationError

log = logging.getLogger("slipstream.compilation")
_lock = new_lock()
_final: bool | None = None  # None: shapes may still be new; else whether a new one is an error
_late: dict[str, int] = {}
_watching = False
_calls: dict[CodeType, CodeType] = {}  # of a gate: its call, and its first call of a signature


class _Refused(threading.local):
    error: CompilationError | None = None


_refused = _Refused()


def shapes_are_final(*, strict: bool) -> None:
    """Say that every shape has been seen. For the whole process; a run says so after its first step. Thread-safe.

    From now on a function of ``first_call_alone``, flex attention among them, that is compiled for a new signature or
    recompiled for any other reason is an error (``strict``), or is counted and logged. What others compile with
    ``torch.compile`` (the target's own code) is counted and logged in either case.
    """
    global _final
    _final = strict
    if not _watching:
        _watch()


def shapes_may_change() -> None:
    """Take ``shapes_are_final`` back and forget the counts. Thread-safe."""
    global _final
    _final = None
    _late.clear()


def late_compilations() -> dict[str, int]:
    """Return how often each function was compiled after ``shapes_are_final``."""
    return dict(_late)


def meet(name: str, what: str, *, ours: bool = True) -> None:
    """Raise CompilationError for a compilation that comes too late, or count and log it; nothing while it may come."""
    strict = _final
    if strict is None:
        return
    told = f"{name} {what} after the shapes were said to be final"
    if strict and ours:
        raise CompilationError(
            f"{told}; it would be compiled again. Keep shapes and modes fixed, or set strict off (run.strict = false)"
        )
    with _lock:
        number = _late[name] = _late.get(name, 0) + 1
    if ours or number in (1, 10, 100, 1000):
        log.warning("%s (number %d)", told, number)


def gate(call: CodeType, first: CodeType) -> None:
    """Tell the code of a gate's call, whose ``self.name`` names the function, and of its first call."""
    _calls[call] = first


def take_refusal() -> CompilationError | None:
    """Return what was raised inside dynamo in this thread, which dynamo wraps in an error of its own, and forget it."""
    error, _refused.error = _refused.error, None
    return error


def _watch() -> None:
    """Look at the start of every compilation from now on."""
    global _watching
    import torch

    with _lock:
        if _watching:
            return
        _watching = True
        handler: Any = getattr(torch._dynamo, "callback_handler", None)
        start = getattr(handler, "install_callbacks", None)
        if start is None:
            log.warning("torch._dynamo.callback_handler is not as known: recompilations for no new shape are not seen")
            return

        # Not as one of its callbacks: one that raises leaves its counter wrong, and later ones are never called.
        def look_first(trigger: Any, *args: Any, **kwargs: Any) -> Any:
            if _final is not None and getattr(trigger, "name", "") == "DYNAMO":
                _look()
            return start(trigger, *args, **kwargs)

        handler.install_callbacks = look_first


def _look() -> None:
    """Find out who compiles in the calling thread, and meet it unless it is a gate's first call, which has been met."""
    frame: Any = sys._getframe(2)
    compiled = ""
    while frame is not None:
        code = frame.f_code
        if code in _calls.values():
            return
        if code in _calls:
            try:
                meet(frame.f_locals["self"].name, "is compiled again for the same signature")
            except CompilationError as error:
                _refused.error = error
                raise
            return
        if not compiled and code.co_name == "_compile" and isinstance(found := frame.f_locals.get("code"), CodeType):
            compiled = found.co_qualname
        frame = frame.f_back
    meet(compiled or "a function", "is compiled", ours=False)
