"""Flags of torch that say "somebody is tracing" for the whole process, kept for each thread.

Readers in torch are changed through ``__code__``: compiled functions keep references to the reader function from
before, which a new attribute of the module would not reach. The new bodies run in torch's own modules, where ``NAME``
is put in reach.
"""

from __future__ import annotations

import threading
from types import CodeType, ModuleType
from typing import Any

NAME = "_slipstream_flags"


class Flags(threading.local):
    """fx: this thread traces with FX. compiling: this thread is in a compile session."""

    fx = False
    compiling = False


flags = Flags()


def per_thread(module: ModuleType, attribute: str, flag: str) -> None:
    """Make ``module.attribute``, read and written from outside the module, the calling thread's ``flag``."""

    def read(_: ModuleType) -> bool:
        return bool(getattr(flags, flag))

    def write(_: ModuleType, value: bool) -> None:
        setattr(flags, flag, value)

    kind = type(module)
    module.__class__ = type(kind.__name__, (kind,), {attribute: property(read, write)})


def names(code: CodeType) -> set[str]:
    """Return the global names and attributes that a code object uses."""
    return set(code.co_names)


class Aside:
    """Runs ``body(hold)`` in a thread of its own; while the context is entered, it stays where it calls ``hold()``."""

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

    def __enter__(self) -> Aside:
        self.thread.start()
        self.inside.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self.leave.set()
        self.thread.join(10)
