"""What Triton's autotuners chose (and FLA's, which derive from them), taken out of one process and into another.

A result is put back only where the kernel, its source and its key are those that it was measured for, and only as one
of the tuner's own configurations: what was changed since is tuned anew.
"""

from __future__ import annotations

import functools
import gc
import json
import math
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

from slipstream.compilation.hooks import when_imported
from slipstream.compilation.locks import new_rlock

_MODULE = "triton.runtime.autotuner"

Result = dict[str, Any]

_lock = new_rlock()
_pending: dict[str, list[Result]] = {}  # by kernel
_restored = 0
_watching = False


class _Results(dict[Any, Any]):
    """A tuner's ``cache`` that takes up what waits for it when a key is first missed.

    Not before: a digest of a kernel's source fixes the globals that the kernel sees, which may still change until it is
    launched.
    """

    def __init__(self, tuner: Any, waiting: list[Result]) -> None:
        super().__init__(tuner.cache)
        self._tuner, self._waiting = tuner, waiting

    def __contains__(self, key: object) -> bool:
        if super().__contains__(key):
            return True
        if self._waiting:
            with _lock:
                _put(self._tuner, self, self._waiting)
                self._waiting = []  # only now: other threads wait at the lock until all are there
        return super().__contains__(key)

    def __reduce__(self) -> tuple[Any, ...]:
        return (dict, (dict(self),))


def _tuners() -> Iterator[Any]:
    """Yield every live tuner. Looks at all objects: about a second in a process that has loaded a model."""
    module = sys.modules.get(_MODULE)
    kind = getattr(module, "Autotuner", None)
    if kind is not None:
        for found in gc.get_objects():
            # type(): isinstance would ask objects for __class__, which proxies answer by importing or raising.
            if issubclass(type(found), kind) and "configs" in found.__dict__:
                yield found


def _plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value))


def _config(config: Any) -> Result:
    """Return a configuration by its fields; its hook is a function, which the tuner that takes it has itself."""
    return {name: value for name, value in vars(config).items() if name != "pre_hook" and value is not None}


def _kernel(tuner: Any) -> tuple[str, Any]:
    """Return the name of a tuner's kernel and the object that digests its source, None without one."""
    function, compiled = tuner.fn, None
    while not hasattr(function, "__code__"):
        if compiled is None and hasattr(type(function), "cache_key"):
            compiled = function
        function = function.fn
    return f"{function.__module__}.{function.__qualname__}", compiled


def _place(tuner: Any) -> tuple[str, tuple[str, ...], tuple[str, ...], str]:
    """Return what a tuner is known by: kernel, arguments, names of the key, and a digest of the source ("": none)."""
    name, compiled = _kernel(tuner)
    return name, tuple(tuner.arg_names), tuple(tuner.keys), "" if compiled is None else str(compiled.cache_key)


def collect() -> list[Result]:
    """Return what the tuners of this process have chosen, ordered, as plain values. Thread-safe.

    Left out are keys and configurations that hold anything but numbers, strings, truth values and None. Restored
    results that no launch has asked for are not among them.
    """
    found: dict[str, Result] = {}
    for tuner in _tuners():
        for key, config in list(tuner.cache.items()):
            fields = _config(config)
            values = [*key, *fields.pop("kwargs", {}).values(), *fields.values()]
            if not all(map(_plain, values)):
                continue
            kernel, arguments, keys, source = _place(tuner)
            result = {
                "kernel": kernel,
                "arguments": list(arguments),
                "keys": list(keys),
                "source": source,
                "key": list(key),
                "config": _config(config),
            }
            found[json.dumps({**result, "config": None})] = result
    return [found[name] for name in sorted(found)]


def encode(results: Sequence[Result]) -> bytes:
    """Return the results as JSON."""
    return json.dumps(list(results), allow_nan=False).encode()


def decode(content: bytes) -> list[Result]:
    """Return the results that ``encode`` wrote. Raises ValueError for anything else."""
    results = json.loads(content)
    kinds = {"kernel": str, "arguments": list, "keys": list, "source": str, "key": list, "config": dict}
    if not isinstance(results, list):
        raise ValueError("no list of tuning results")
    for result in results:
        if not isinstance(result, dict) or not all(isinstance(result.get(n), kind) for n, kind in kinds.items()):
            raise ValueError("no tuning result")
    return results


def restore(results: Sequence[Result]) -> None:
    """Give results to the tuners that are there, and to those that are made later, in this process. Thread-safe.

    A tuner takes them up when it first meets a key that it has not tuned; a choice that it has made already is kept.
    Triton need not be imported yet, and is not imported.
    """
    global _watching
    with _lock:
        for result in results:
            _pending.setdefault(result["kernel"], []).append(result)
        for tuner in _tuners():
            _wait(tuner)
        if _watching:
            return
        _watching = True
    when_imported(_MODULE, _watch)


def restored() -> int:
    """Return how many results tuners have taken up so far."""
    return _restored


def forget() -> None:
    """Give no more results to tuners that are made from now on, and count from nothing. Thread-safe."""
    global _restored
    with _lock:
        _pending.clear()
        _restored = 0


def _wait(tuner: Any) -> None:
    """Let a tuner know of the results for its kernel. The caller holds the lock."""
    if _pending and (waiting := _pending.get(_kernel(tuner)[0])):
        tuner.cache = _Results(tuner, list(waiting))


def _put(tuner: Any, cache: _Results, waiting: list[Result]) -> None:
    """Put those results into a tuner's cache that were measured for it. The caller holds the lock."""
    global _restored
    place = _place(tuner)
    for result in waiting:
        if place != (result["kernel"], tuple(result["arguments"]), tuple(result["keys"]), result["source"]):
            continue
        config = next((c for c in tuner.configs if _config(c) == result["config"]), None)
        key = tuple(result["key"])
        if config is not None and key not in cache.keys():  # noqa: SIM118 (``in cache`` comes back here)
            cache[key] = config
            _restored += 1


def _watch(module: ModuleType) -> None:
    """Look at every tuner as it is made."""
    tuner: Any = module.Autotuner  # type: ignore[attr-defined]
    make = tuner.__init__

    @functools.wraps(make)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        with _lock:
            _wait(self)

    tuner.__init__ = made
