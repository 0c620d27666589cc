"""Stress workloads on GPUs: inductor's flex attention, a Triton kernel that is really tuned, FLA's gated delta rule.

Each thread has a stream of its own; with several GPUs the threads are spread over them.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

from slipstream.compilation.guard import _attend, first_call_alone
from slipstream.compilation.stress_cpu import gradients, numbers
from slipstream.compilation.stress_rounds import Body, Cold, Counts, Workload


@contextlib.contextmanager
def on_device(thread: int) -> Iterator[str]:
    """Work on the thread's GPU, in a stream of its own that is waited for at the end; the device's name."""
    import torch

    index = thread % torch.cuda.device_count()
    with torch.cuda.device(index):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            yield f"cuda:{index}"
        stream.synchronize()


def _placed(thread: int, work: Callable[[str], list[Any]]) -> Body:
    def body() -> list[Any]:
        with on_device(thread) as device:
            return work(device)

    return body


class _Cuda(Workload):
    device = "cuda"

    def prepare(self, guard: bool, counts: Counts) -> None:
        """See Workload."""
        super().prepare(guard, counts)
        import torch

        # The devices' contexts are made here: that threads may make them is not what is tested.
        for index in range(torch.cuda.device_count()):
            torch.zeros(8, device=f"cuda:{index}").sum().item()


class CudaFlex(_Cuda):
    """Threads compile flex attention with inductor, forward and backward, each for a length of its own."""

    name, uses_flex = "flex", True
    rounds_per_process = 4
    tolerance = 2e-2  # bfloat16; what is done alone is the same kernel

    def prepare(self, guard: bool, counts: Counts) -> None:
        """See Workload."""
        super().prepare(guard, counts)
        from torch._inductor.runtime import triton_heuristics

        tuner: Any = triton_heuristics.CachingAutotuner
        tune = tuner.autotune_to_one_config

        def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
            counts.bench(self)
            return tune(self, *args, **kwargs)

        tuner.autotune_to_one_config = counted

    def cold(self, number: int, seed: int, threads: int) -> Cold:
        """See Workload."""
        import torch
        from torch._inductor.utils import clear_caches

        torch._dynamo.reset()
        clear_caches()
        attends = [self._attend() for _ in range(1 if self.guard else threads)]
        works = [self._work(attends[i % len(attends)], number, seed, i) for i in range(threads)]
        bodies = [_placed(i, work(3)) for i, work in enumerate(works)]
        return Cold(bodies, [_placed(i, work(1)) for i, work in enumerate(works)], [0.15 * i for i in range(threads)])

    def _attend(self) -> Any:
        import torch
        from torch.nn.attention.flex_attention import flex_attention

        if self.guard:
            return first_call_alone(_attend)
        compiled: list[Any] = []

        def attend(q: Any, k: Any, v: Any, mask: Any) -> Any:
            if not compiled:  # by the thread whose it is
                compiled.append(torch.compile(flex_attention))
            return compiled[0](q, k, v, block_mask=mask, enable_gqa=True)

        return attend

    def _work(self, attend: Any, number: int, seed: int, thread: int) -> Callable[[int], Callable[[str], list[Any]]]:
        import torch
        from torch.nn.attention.flex_attention import create_block_mask

        draw, positions = numbers(seed, number, thread), 1024 + 128 * (thread + number % 3)
        home = f"cuda:{thread % torch.cuda.device_count()}"
        leaves = [draw(1, heads, positions, 64).bfloat16() for heads in (4, 2, 2)]

        def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
            return q >= k

        # By the main thread: workload masks, on the CPU, has threads make them.
        mask = create_block_mask(causal, 1, None, positions, positions, device=home)
        torch.cuda.synchronize(home)

        def calls(times: int) -> Callable[[str], list[Any]]:
            def work(device: str) -> list[Any]:
                placed = [leaf.to(device) for leaf in leaves]
                results = [gradients(attend, placed, mask) for _ in range(times)][-1]
                torch.cuda.current_stream().synchronize()
                return results

            return work

        return calls


class CudaTuner(_Cuda):
    """Threads launch one untuned Triton kernel: keys that all share, and keys of their own."""

    name, restore = "triton", False
    rounds_per_process = 25
    size = 1 << 16

    def lacking(self) -> str:
        """See Workload."""
        return "" if importlib.util.find_spec("triton") else "Triton is not installed"

    def _kernel(self) -> Any:
        import triton

        from slipstream.compilation.stress_triton import add_one_and_copy

        def bench(call: Any, quantiles: Any = None) -> Any:
            return triton.testing.do_bench(call, warmup=1, rep=3, quantiles=quantiles)

        configs = [triton.Config({"block": b}, num_warps=w) for b in (256, 512, 1024, 2048) for w in (2, 4)]
        restored = ["x"] if self.restore else None
        tuned = triton.autotune(
            configs=configs, key=["n"], restore_value=restored, do_bench=self.counts.counting(bench)
        )
        return tuned(add_one_and_copy)

    def cold(self, number: int, seed: int, threads: int) -> Cold:
        """See Workload."""
        kernel, alone = self._kernel(), self._kernel()
        bodies, references = list[Body](), list[Body]()
        for i in range(threads):
            start = numbers(seed, number, i)(self.size)
            own, common = self.size - 10 - i, self.size - number % 2
            keys = [own, common, own] if number % 2 else [common, own, common]
            for made, launched in ((bodies, kernel), (references, alone)):
                made.append(_placed(i, self._launches(launched, start, keys)))
        return Cold(bodies, references, [0.0] * threads)

    def _launches(self, kernel: Any, start: Any, keys: list[int]) -> Callable[[str], list[Any]]:
        import torch

        def work(device: str) -> list[Any]:
            x, seen = start.to(device), []
            for n in keys:
                y = torch.zeros_like(x)
                kernel[lambda meta, n=n: (-(-n // meta["block"]),)](x, y, n, change=self.restore)
                seen.append(y)
            torch.cuda.current_stream().synchronize()
            return [x, *seen]

        return work


class CudaRestoringTuner(CudaTuner):
    """The same with a kernel that changes its input, which the tuner has to restore after each timing."""

    name, restore = "triton-restore", True


class Fla(_Cuda):
    """Threads call FLA's gated delta rule for the first time, forward and backward; a process for each round."""

    name = "fla"
    rounds_per_process = 1
    tolerance = 3e-2  # bfloat16, and kernels that were tuned otherwise add in another order

    def lacking(self) -> str:
        """See Workload."""
        missing = [name for name in ("triton", "fla") if not importlib.util.find_spec(name)]
        return f"{missing[0]} is not installed" if missing else ""

    def prepare(self, guard: bool, counts: Counts) -> None:
        """See Workload."""
        import triton

        # Tuners take it from here when they are first used. Before FLA is imported.
        triton.testing.do_bench = counts.counting(triton.testing.do_bench)
        super().prepare(guard, counts)

    def cold(self, number: int, seed: int, threads: int) -> Cold:
        """See Workload."""
        bodies = [_placed(i, self._work(number, seed, i)) for i in range(threads)]
        return Cold(bodies, bodies, [0.0] * threads)

    def _work(self, number: int, seed: int, thread: int) -> Callable[[str], list[Any]]:
        import torch
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        draw, tokens, heads, width = numbers(seed, number, thread), 1024, 16, 128
        leaves = [
            *(draw(1, tokens, heads, width).bfloat16() for _ in range(3)),
            -draw(1, tokens, heads).abs(),
            draw(1, tokens, heads).sigmoid().bfloat16(),
        ]

        def rule(q: Any, k: Any, v: Any, g: Any, beta: Any) -> Any:
            return chunk_gated_delta_rule(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0]

        def work(device: str) -> list[Any]:
            results = self._gradients(rule, [leaf.to(device) for leaf in leaves])
            torch.cuda.current_stream().synchronize()
            return results

        return work

    def _gradients(self, rule: Callable[..., Any], leaves: list[Any]) -> list[Any]:
        """As ``gradients``, without those that FLA refuses to compute: with some GPUs they are known to be wrong."""
        copies = [leaf.detach().clone().requires_grad_() for leaf in leaves]
        out = rule(*copies)
        try:
            out.float().square().sum().backward()
        except RuntimeError as error:
            if "incorrect results" not in str(error):
                raise
            self.counts.leave_out(f"the backward, which FLA refuses here ({' '.join(str(error).split())[:100]}...)")
            return [out.detach()]
        return [out.detach(), *(copy.grad for copy in copies)]


WORKLOADS: tuple[type[Workload], ...] = (CudaFlex, CudaTuner, CudaRestoringTuner, Fla)
