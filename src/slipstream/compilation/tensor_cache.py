"""FLA's ``tensor_cache``: the last results of index calculations, kept by the identity of their arguments.

The queue that keeps them is shared by all threads: one iterates it while another appends ("deque mutated during
iteration"), and a result is handed to another thread, and so another stream, without an event. Here each thread has a
queue of its own, in functions that are decorated already and in those that are decorated later.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

from slipstream.compilation.hazards import Hazard

MODULE = "fla.utils"


class QueuePerThread(threading.local):
    """Stands in for a bounded deque; each thread sees its own."""

    def __init__(self, iterable: Any = (), maxlen: int | None = None) -> None:
        self._own: deque[Any] = deque(iterable, maxlen)

    def append(self, item: Any) -> None:
        """Append to the calling thread's queue."""
        self._own.append(item)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._own)

    def __len__(self) -> int:
        return len(self._own)

    def clear(self) -> None:
        """Empty the calling thread's queue."""
        self._own.clear()


def _decorator() -> Any:
    return getattr(sys.modules[MODULE], "tensor_cache", None)


def _home() -> ModuleType:
    """Return the module whose ``deque`` the decorator uses."""
    return sys.modules[_decorator().__module__]


def _unknown() -> str:
    if _decorator() is None:
        return "fla.utils has no tensor_cache"
    if getattr(_home(), "deque", None) not in (deque, QueuePerThread):
        return f"{_home().__name__} keeps its results in no deque"
    return ""


def _shared_queues() -> Iterator[tuple[Any, FunctionType]]:
    """Yield (closure cell, function) of decorated functions whose queue is still shared."""
    for name, module in list(sys.modules.items()):
        if not (name == "fla" or name.startswith("fla.")) or module is None:
            continue
        for value in list(vars(module).values()):
            if isinstance(value, FunctionType) and hasattr(value, "__wrapped__") and value.__closure__:
                for cell in value.__closure__:
                    try:
                        content = cell.cell_contents
                    except ValueError:  # not filled yet
                        continue
                    if type(content) is deque:
                        yield cell, value


def _apply() -> None:
    _home().deque = QueuePerThread  # type: ignore[attr-defined]
    for cell, _ in list(_shared_queues()):
        if type(cell.cell_contents) is deque:  # a function that several modules import comes by more than once
            cell.cell_contents = QueuePerThread(maxlen=cell.cell_contents.maxlen)


def _check() -> str:
    calls: list[int] = []

    def calculate(x: Any) -> Any:
        calls.append(threading.get_ident())
        return x

    cached, argument = _decorator()(calculate), object()
    other = threading.Thread(target=lambda: cached(argument))
    other.start()
    other.join()
    cached(argument)
    if len(calls) < 2:
        return "a result that another thread calculated was handed to this one"
    for _, function in _shared_queues():
        return f"{function.__module__}.{function.__qualname__} keeps its results for all threads"
    return ""


TENSOR_CACHE = Hazard(
    name="fla-tensor-cache",
    what="threads share the results that FLA keeps, and the queue that holds them",
    module=MODULE,
    needed=lambda: True,
    unknown=_unknown,
    apply=_apply,
    check=_check,
)
