"""Kernels for stress runs of Triton's tuner without a GPU: the tuner is real, the kernel and its timing are not."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


class FakeKernel:
    """Stands in for a compiled kernel: ``y = x``, and then ``x = x + 1`` if it changes its input."""

    def __init__(self, changes_input: bool = False) -> None:
        def add_one_and_copy(x: Any, y: Any, n: int) -> None:
            """Named by the tuner's messages."""

        self.fn = add_one_and_copy
        self.arg_names = ["x", "y", "n"]
        self.changes_input = changes_input

    def run(self, x: Any, y: Any, n: int, **_: Any) -> None:
        """Do the kernel's work."""
        y.copy_(x)
        if self.changes_input:
            x.add_(1)


def fake_bench(call: Callable[[], None], quantiles: Any = None) -> list[float]:
    """Launch twice, as a timing does, and let other threads run in between, as waiting for a GPU does."""
    for _ in range(2):
        call()
        time.sleep(0.0005)
    return [1.0, 1.0, 1.0]
