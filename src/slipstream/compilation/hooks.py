"""Act on a module as soon as it is imported, whether that was before or comes later."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable, Sequence
from importlib._bootstrap import _lock_unlock_module as _wait_for  # type: ignore[attr-defined]
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from slipstream.compilation.locks import new_lock

Action = Callable[[ModuleType], None]

_lock = new_lock()
_pending: dict[str, list[Action]] = {}
_looking = threading.local()


class _Finder(MetaPathFinder):
    """Finds nothing itself: it lets the others find a module that is waited for, and adds to its execution."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _pending or getattr(_looking, "name", None) == fullname:
            return None
        _looking.name = fullname
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            _looking.name = None
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            with _lock:
                actions = _pending.pop(fullname, [])
            for action in actions:
                action(module)

        loader.exec_module = exec_module
        return spec


_finder = _Finder()


def when_imported(name: str, action: Action) -> bool:
    """Run ``action(module)`` once: now if ``name`` is imported, else right after its code has run. Thread-safe.

    Returns whether it ran now. A module that another thread is just importing is waited for.
    """
    if name not in sys.modules:
        with _lock:
            _pending.setdefault(name, []).append(action)
            if _finder not in sys.meta_path:
                sys.meta_path.insert(0, _finder)
        # An import that began before the action was there may not have looked for it. In a circle of threads, each of
        # which waits for another's import, this does not wait: there, the module has not been looked for yet.
        _wait_for(name)
        if name not in sys.modules:
            return False
        with _lock:  # it came in between, and may have passed the finder by
            waiting = _pending.get(name, [])
            if action not in waiting:
                return True
            waiting.remove(action)
    action(importlib.import_module(name))
    return True


def installed(name: str) -> bool:
    """Say whether a top-level package can be imported, without importing it."""
    if name in sys.modules:
        return True
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False
