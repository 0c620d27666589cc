"""Stress workloads with flex attention that need no GPU: compiled with ``aot_eager``, whose kernels are torch's own."""

from __future__ import annotations

from functools import partial
from typing import Any

from slipstream.compilation.guard import _attend, first_call_alone
from slipstream.compilation.stress_cpu import BACKEND, STAGGER, Compile, Others, gradients, numbers, until
from slipstream.compilation.stress_rounds import Body, Cold, Counts, Workload


class Flex(Workload):
    """Threads compile flex attention with a block mask, forward and backward.

    Without the guard each compiles it for itself, as libraries do; with it they share what the package offers.
    """

    name, device, uses_flex = "flex", "cpu", True
    rounds_per_process = 25
    tolerance = 1e-4
    positions = 128

    def prepare(self, guard: bool, counts: Counts) -> None:
        """See Workload."""
        super().prepare(guard, counts)
        from torch.nn.attention import flex_attention as flex

        # torch refuses the backward on a CPU, where inductor has no kernel for it. aot_eager needs none.
        flex._validate_device = lambda *_: None  # type: ignore[assignment]

    def attend(self) -> Any:
        """Return ``attend(query, key, value, block_mask)``, compiled at its first call."""
        import torch
        from torch.nn.attention.flex_attention import flex_attention

        if self.guard:
            return first_call_alone(_attend, backend=BACKEND)
        compiled: Any = torch.compile(flex_attention, backend=BACKEND)
        return lambda q, k, v, mask: compiled(q, k, v, block_mask=mask, enable_gqa=True)

    def _leaves(self, number: int, seed: int, thread: int) -> list[Any]:
        draw = numbers(seed, number, thread)
        rows = 1 + (thread % 2) * (number % 2)
        return [draw(rows, heads, self.positions, 16) for heads in (2, 1, 1)]

    def _body(self, attend: Any, leaves: list[Any], calls: int = 2) -> Body:
        mask = _block_mask(self.positions)  # by the main thread: workload masks has threads make them
        return lambda: [gradients(attend, leaves, mask) for _ in range(calls)][-1]

    def cold(self, number: int, seed: int, threads: int) -> Cold:
        """See Workload."""
        import torch

        torch._dynamo.reset()
        shared, bodies, alone = self.attend(), list[Body](), list[Body]()
        for i in range(threads):
            leaves = self._leaves(number, seed, i)
            bodies.append(self._body(shared if self.guard else self.attend(), leaves))
            alone.append(partial(gradients, _plain_attention, leaves))
        return Cold(bodies, alone, [STAGGER * i for i in range(threads)])


def _causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def _block_mask(positions: int) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(_causal, 1, None, positions, positions, device="cpu")


def _plain_attention(query: Any, key: Any, value: Any) -> Any:
    import torch

    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(later, float("-inf")).softmax(-1) @ value


class Selection(Flex):
    """One thread asks ``is_compiling`` which attention to call, as libraries do, while the others compile.

    The answer is about itself. If it is about the others, it calls flex attention uncompiled.
    """

    name = "selection"

    def cold(self, number: int, seed: int, threads: int) -> Cold:
        """See Workload."""
        import torch
        from torch.nn.attention.flex_attention import flex_attention

        work = super().cold(number, seed, threads)
        leaves, mask, compiled = self._leaves(number, seed, threads), _block_mask(self.positions), self.attend()
        gradients(compiled, leaves, mask)
        others = Others(threads - 1)

        def select(query: Any, key: Any, value: Any) -> Any:
            if torch.compiler.is_compiling():
                return flex_attention(query, key, value, block_mask=mask, enable_gqa=True)
            return compiled(query, key, value, mask)

        def asks() -> list[Any]:
            return until(others.done, lambda: gradients(select, leaves))

        bodies = [asks, *(others.one(b) for b in work.bodies[1:])]
        return Cold(bodies, [lambda: gradients(_plain_attention, leaves), *work.alone[1:]], work.delays)


class Masks(Compile):
    """One thread makes block masks while the others compile what has nothing to do with them.

    To make one, torch annotates what it traces, or would trace: since 2.13 "run this uncompiled". The annotation is
    the process's: it fails with KeyError when another thread's trace sets it back, or ends up in that thread's graph,
    where inductor obeys it.
    """

    name = "masks"
    annotation = "fallback_to_eager"

    def cold(self, number: int, seed: int, threads: int) -> Cold:
        """See Workload."""
        work, others = super().cold(number, seed, threads), Others(threads - 1)

        def makes() -> list[Any]:
            mask = _block_mask(512)
            return [mask.kv_num_blocks, mask.kv_indices, mask.q_num_blocks, mask.q_indices]

        bodies = [lambda: until(others.done, makes), *(others.one(b) for b in work.bodies[1:])]
        return Cold(bodies, [makes, *work.alone[1:]], work.delays)

    def _body(self, function: Any, leaves: list[Any], calls: int = 3) -> Body:
        import torch
        from torch._dynamo.backends.common import aot_autograd
        from torch._functorch.compilers import nop

        foreign: list[str] = []

        def look(graph: Any, inputs: list[Any]) -> Any:
            foreign.extend(n.name for n in graph.graph.nodes if self.annotation in n.meta.get("custom", {}))
            return nop(graph, inputs)

        def body() -> list[Any]:
            compiled = torch.compile(function, backend=aot_autograd(fw_compiler=look, bw_compiler=look), fullgraph=True)
            result = [gradients(compiled, leaves) for _ in range(calls)][-1]
            if foreign:
                raise RuntimeError(f"another thread's annotation {self.annotation} is in this thread's graph")
            return result

        return body


WORKLOADS: tuple[type[Workload], ...] = (Masks, Flex, Selection)
