"""Which modules a forward calls."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from torch import nn


@contextlib.contextmanager
def calls_of(modules: Mapping[str, nn.Module]) -> Iterator[list[str]]:
    """Give a list that gets a module's name whenever it is called."""
    calls: list[str] = []
    handles = [m.register_forward_pre_hook(lambda _m, _a, name=name: calls.append(name)) for name, m in modules.items()]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()
