"""Stress workloads that need no GPU; those with flex attention are in ``stress_flex``.

Compilation goes through ``aot_eager``: the same tracing of forward and backward as with inductor, without its kernels.
The tuner is Triton's own, over a kernel and a timing that are stood in for.
"""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

from slipstream.compilation.stress_kernels import FakeKernel, fake_bench
from slipstream.compilation.stress_rounds import Body, Cold, Workload

BACKEND = "aot_eager"
# Threads that start together all pass torch's check before the first of them traces; later ones meet it.
STAGGER = 0.02


def fresh(function: Any) -> Any:
    """Return the function over code of its own, for which dynamo has compiled nothing."""
    return FunctionType(
        function.__code__.replace(), function.__globals__, function.__name__, None, function.__closure__
    )


def numbers(seed: int, number: int, thread: int) -> Callable[..., Any]:
    """Return ``draw(*shape)``, which makes normal tensors that depend on seed, round and thread only."""
    import torch

    generator = torch.Generator().manual_seed((seed * 1_000_003 + number) * 1_009 + thread)
    return lambda *shape: torch.randn(*shape, generator=generator)


def gradients(function: Any, leaves: list[Any], *others: Any) -> list[Any]:
    """Return [output, gradient of each leaf], forward and backward through ``function``."""
    copies = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    out = function(*copies, *others)
    out.float().square().sum().backward()
    return [out.detach(), *(copy.grad for copy in copies)]


def until(done: threading.Event, call: Body) -> list[Any]:
    """Call until the others are done, and return the first results, or later ones that differ from them."""
    import torch

    first = call()
    while not done.is_set():
        again = call()
        if not all(torch.equal(a, b) for a, b in zip(first, again, strict=True)):
            return again
    return first


class Others:
    """Sets ``done`` when as many bodies as said have ended, whether they raised or not."""

    def __init__(self, bodies: int) -> None:
        self.left, self.lock, self.done = bodies, threading.Lock(), threading.Event()
        if not bodies:
            self.done.set()

    def one(self, body: Body) -> Body:
        """Return the body as one of them."""

        def run() -> list[Any]:
            try:
                return body()
            finally:
                with self.lock:
                    self.left -= 1
                    if not self.left:
                        self.done.set()

        return run


def _network(x: Any, w: Any) -> Any:
    hidden = (x @ w).sigmoid()
    return hidden * hidden.softmax(-1)


class Compile(Workload):
    """Threads compile forward and backward: in even rounds one function, in odd ones each its own."""

    name, device = "compile", "cpu"

    def _body(self, function: Any, leaves: list[Any], calls: int = 3) -> Body:
        import torch

        def body() -> list[Any]:
            compiled = torch.compile(function, backend=BACKEND, fullgraph=True)
            return [gradients(compiled, leaves) for _ in range(calls)][-1]

        return body

    def cold(self, number: int, seed: int, threads: int) -> Cold:
        """See Workload."""
        import torch

        torch._dynamo.reset()
        shared, bodies, alone = fresh(_network), list[Body](), list[Body]()
        for i in range(threads):
            draw = numbers(seed, number, i)
            rows = 4 + i * (number % 2)
            leaves = [draw(rows, 8), draw(8, 8)]
            bodies.append(self._body(fresh(_network) if number % 2 else shared, leaves))
            alone.append(partial(gradients, _network, leaves))
        return Cold(bodies, alone, [STAGGER * i for i in range(threads)])


class Mixed(Compile):
    """One thread goes on calling what is compiled already, and modules, while the others compile."""

    name = "mixed"

    def cold(self, number: int, seed: int, threads: int) -> Cold:
        """See Workload."""
        import torch

        work = super().cold(number, seed, threads)
        draw = numbers(seed, number, threads)
        leaves, module = [draw(4, 8), draw(8, 8)], torch.nn.Linear(8, 8)
        with torch.no_grad():
            module.weight.copy_(draw(8, 8)), module.bias.zero_()  # type: ignore[func-returns-value]
        compiled = torch.compile(fresh(_network), backend=BACKEND, fullgraph=True)
        gradients(compiled, leaves)
        others = Others(threads - 1)

        def calls(function: Any) -> Body:
            return lambda: [*gradients(function, leaves), *gradients(module, leaves[:1])]

        bodies = [lambda: until(others.done, calls(compiled)), *(others.one(b) for b in work.bodies[1:])]
        return Cold(bodies, [calls(_network), *work.alone[1:]], work.delays)


class Tuner(Workload):
    """Threads launch one untuned kernel: keys that all share, and keys of their own."""

    name, device = "triton", "cpu"
    rounds_per_process = 100
    restore = False

    def lacking(self) -> str:
        """See Workload."""
        return "" if importlib.util.find_spec("triton") else "Triton is not installed"

    def _kernel(self) -> Any:
        import triton
        from triton.runtime.autotuner import Autotuner

        configs = [triton.Config({}, num_warps=w) for w in (1, 2, 4, 8)]
        bench = self.counts.counting(fake_bench)
        restored = ["x"] if self.restore else None
        return Autotuner(FakeKernel(self.restore), ["x", "y", "n"], configs, ["n"], None, restored, do_bench=bench)

    def cold(self, number: int, seed: int, threads: int) -> Cold:
        """See Workload."""
        kernel, bodies, alone = self._kernel(), list[Body](), list[Body]()
        for i in range(threads):
            start = numbers(seed, number, i)(16)
            own = [1_000 + i, 2_000 + i]
            keys = [1, own[0], 1, 2, own[1], 2] if number % 2 else [own[0], 1, own[0], own[1], 2, own[1]]
            bodies.append(partial(_launches, kernel, start, keys))
            alone.append(partial(_launches, self._kernel(), start, keys))
        return Cold(bodies, alone, [0.0] * threads)


class RestoringTuner(Tuner):
    """The same with a kernel that changes its input, which the tuner has to restore after each timing."""

    name, restore = "triton-restore", True


def _launches(kernel: Any, start: Any, keys: list[int]) -> list[Any]:
    import torch

    x, seen = start.clone(), []
    for key in keys:
        y = torch.zeros_like(x)
        kernel.run(x, y, key)
        seen.append(y)
    return [x, *seen]


WORKLOADS: tuple[type[Workload], ...] = (Compile, Mixed, Tuner, RestoringTuner)
