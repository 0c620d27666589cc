"""FLA's kernels are tuned once, not anew for each number of rows.

Triton's tuner keeps its choice by the arguments that a kernel names as its key. Some of FLA's keys hold a count: ``B``
is the number of rows, ``NB`` how many blocks of 65,536 vectors there are. Where decoding drops rows that have ended, or
reads prompts of another length, each new count compiles and times every configuration again: 25 of them for the norm of
queries and keys, ten seconds in which the GPU has nothing to do. A tuner may choose badly for a count that it has not
timed, but it cannot be wrong: a configuration decides how a kernel runs, not what it returns.
"""

from __future__ import annotations

import functools
import sys
from types import ModuleType
from typing import Any

from slipstream.compilation.hooks import when_imported
from slipstream.compilation.locks import new_lock

COUNTS = frozenset({"B", "NB"})

_MODULE = "triton.runtime.autotuner"
_PACKAGE = "fla."

_lock = new_lock()
_watching = False


def tune_for_any_count() -> None:
    """From now on no tuner of FLA's tells numbers of rows apart, in this process. Idempotent and thread-safe.

    Triton and FLA need not be imported yet, and are not imported. A choice made before, for some count, then holds for
    all, the largest count's where there are several. Call it before results are restored or collected
    (``tuning_results``): they are known by their keys.
    """
    global _watching
    with _lock:
        if _watching:
            return
        _watching = True
    when_imported(_MODULE, _watch)


def _watch(module: ModuleType) -> None:
    """Shorten the keys of the tuners that are there, and of each that is made."""
    kind: Any = module.Autotuner  # type: ignore[attr-defined]
    make = kind.__init__

    @functools.wraps(make)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        _shorten(self)

    kind.__init__ = made
    for name, found in list(sys.modules.items()):
        if name.startswith(_PACKAGE):
            for value in list(vars(found).values()):
                tuner = value
                while tuner is not None and not isinstance(tuner, kind):  # a kernel's decorators lie one in another
                    tuner = vars(tuner).get("fn") if hasattr(tuner, "__dict__") else None
                if tuner is not None:
                    _shorten(tuner)


def _shorten(tuner: Any) -> None:
    """Leave the counts out of the key of a tuner of FLA's."""
    function = tuner.fn
    while not hasattr(function, "__code__"):
        function = getattr(function, "fn", None)
        if function is None:
            return
    names = list(tuner.keys)
    if not (str(function.__module__).startswith(_PACKAGE) and COUNTS.intersection(names)):
        return

    def count(key: tuple[Any, ...]) -> int:
        return sum(value for name, value in zip(names, key, strict=False) if name in COUNTS)

    made = list(tuner.cache.items())
    for key, config in sorted(made, key=lambda item: count(item[0]), reverse=True):  # the largest: it was timed best
        values = [v for name, v in zip(names, key, strict=False) if name not in COUNTS]
        tuner.cache.setdefault((*values, *key[len(names) :]), config)  # behind the names' values stand the dtypes
    tuner.keys = [name for name in names if name not in COUNTS]
