"""Settings of torch's compiler that must hold in every thread, autograd's own included.

Backward graphs are compiled lazily by default, on autograd's thread of the device, under torch's compile lock. A thread
that holds that lock while it traces flex attention needs the same autograd thread: each waits for the other, for ever.
``force_non_lazy_backward_lowering`` compiles the backward with the forward, in the calling thread.

Since torch 2.12 a setting that is assigned holds in the assigning thread's context only; a thread that is started
later, and autograd's threads, see the default. ``share`` makes an assigned value everybody's default.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from slipstream.compilation.hazards import Hazard

_MODULES = ("torch._functorch.config", "torch._dynamo.config", "torch._inductor.config")
_LAZY = "force_non_lazy_backward_lowering"


def _entries() -> Iterator[tuple[Any, str, Any]]:
    """Yield (config module, setting, entry) of the config modules that are imported."""
    for name in _MODULES:
        module: Any = sys.modules.get(name)
        if module is not None:
            for key, entry in module._config.items():
                yield module, key, entry


def _per_thread(entry: Any) -> bool:
    return isinstance(getattr(entry, "user_override", None), ContextVar)


def _plain(value: Any) -> bool:
    """Whether a value can be everybody's default: nobody can change it in place."""
    return value is None or isinstance(value, bool | int | float | str)


def share() -> list[str]:
    """Make the settings that the calling thread has assigned hold in every thread; return their names.

    A no-op where torch's settings are the process's anyway (before 2.12). Values that can be changed in place (lists,
    dictionaries) are left alone. Call it again after assigning more.
    """
    shared = []
    for module, key, entry in _entries():
        if not _per_thread(entry):
            continue
        value = entry.user_override.get()
        if _plain(value) and value != entry.env_value_default:  # the sign for "not assigned" is an object
            entry.env_value_default = value
            shared.append(f"{module.__name__}.{key}")
    return shared


def _functorch() -> Any:
    return sys.modules["torch._functorch.config"]


def _lazy_needed() -> bool:
    return True


def _lazy_unknown() -> str:
    if _LAZY not in _functorch()._config:
        return f"torch._functorch.config has no {_LAZY}"
    return ""


def _lazy_apply() -> None:
    setattr(_functorch(), _LAZY, True)
    share()


def _in_new_thread(read: Any) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(read()))
    thread.start()
    thread.join()
    return found[0]


def _lazy_check() -> str:
    config = _functorch()
    for where, value in (
        ("this thread", getattr(config, _LAZY)),
        ("a new thread", _in_new_thread(lambda: getattr(config, _LAZY))),
    ):
        if value is not True:
            return f"torch._functorch.config.{_LAZY} is {value} in {where}"
    return ""


def _config_needed() -> bool:
    return any(_per_thread(entry) for _, _, entry in _entries())


def _config_check() -> str:
    mine = {}
    for module, key, entry in _entries():
        if _per_thread(entry):
            value = entry.user_override.get()
            if _plain(value):
                mine[module, key] = value
    others = _in_new_thread(lambda: {(module, key): getattr(module, key) for module, key in mine})
    for (module, key), value in mine.items():
        if others[module, key] != value:
            return (
                f"{module.__name__}.{key} is {value!r} in this thread and {others[module, key]!r} in a new one: assign "
                "it before install(), or call install() again"
            )
    return ""


LAZY_BACKWARD = Hazard(
    name="lazy-backward",
    what="a backward that is compiled on autograd's thread and a forward that is traced wait for each other for ever",
    module="torch._functorch.config",
    needed=_lazy_needed,
    unknown=_lazy_unknown,
    apply=_lazy_apply,
    check=_lazy_check,
)
THREAD_CONFIG = Hazard(
    name="thread-config",
    what="settings that one thread assigns do not hold in the others",
    module="torch._functorch.config",
    needed=_config_needed,
    unknown=lambda: "",
    apply=lambda: None,
    check=_config_check,
)
