"""What ``slipstream.compilation`` adds to calls that are warm: to a compiled call and to an autotuned Triton launch.

    python benchmarks/compilation_overhead.py [--rounds 7]

Stock and installed are measured in fresh processes that take turns; each figure is the best of its rounds, so that
other work on the machine disturbs both alike. No GPU is needed: the compiled function does next to nothing, the kernel
launches nothing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable

CALLS = 20_000


def best(call: Callable[[], object], calls: int = CALLS, repeats: int = 5) -> float:
    """Return the shortest time of a call, in nanoseconds."""
    for _ in range(100):
        call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter_ns()
        for _ in range(calls):
            call()
        times.append((time.perf_counter_ns() - start) / calls)
    return min(times)


def measure(installed: bool) -> dict[str, float]:
    """Return nanoseconds by name, in this process."""
    import torch

    from slipstream import compilation
    from slipstream.compilation.autotune import _Kernel

    if installed:
        compilation.install()
    figures = {}
    x = torch.ones(4)
    query = torch.ones(1, 2, 128, 16)

    def trivial(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: object) -> torch.Tensor:
        return q + 1

    compiled = torch.compile(trivial, backend="eager", fullgraph=True, dynamic=False)
    alone = compilation.guard.FirstCallAlone(trivial, key=compilation.guard._attend_key, backend="eager")
    from torch.nn.attention.flex_attention import create_block_mask

    low = torch.zeros(1, 4, dtype=torch.int32)
    mask = create_block_mask(lambda b, h, q, k: k >= low[b, h], 1, None, 128, 128, device="cpu")
    figures["torch.compile"] = best(lambda: compiled(query, query, query, mask), 5000)
    figures["first_call_alone"] = best(lambda: (alone if installed else compiled)(query, query, query, mask), 5000)
    figures["its key"] = best(
        (lambda: compilation.guard._attend_key(query, query, query, mask)) if installed else (lambda: None)
    )
    figures["is_compiling"] = best(torch.compiler.is_compiling)
    figures["is_fx_symbolic_tracing"] = best(torch.fx._symbolic_trace.is_fx_symbolic_tracing)
    try:
        import triton
        from triton.runtime.autotuner import Autotuner
    except ImportError:
        return figures
    configs = [triton.Config({}, num_warps=w) for w in (1, 2)]
    tuner = Autotuner(_Kernel(), ["x"], configs, ["x"], None, None, do_bench=lambda call, quantiles: [1.0] * 3)
    tuner.run(1)
    figures["Autotuner.run"] = best(lambda: tuner.run(1))
    del x
    return figures


def main() -> None:
    """Measure both in turns and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--one", choices=("stock", "installed"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one == "installed")))
        return
    found: dict[str, dict[str, float]] = {"stock": {}, "installed": {}}
    for number in range(args.rounds):
        for which, figures in found.items():
            command = [sys.executable, __file__, "--one", which]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            for name, value in json.loads(done.stdout.splitlines()[-1]).items():
                figures[name] = min(value, figures.get(name, value))
        print(f"round {number + 1} of {args.rounds}", file=sys.stderr)
    print(f"{'nanoseconds a call':26s} {'stock':>9s} {'installed':>9s} {'added':>7s} {'ratio':>6s}")
    for name, stock in found["stock"].items():
        ours = found["installed"][name]
        ratio = f"{ours / stock:6.2f}" if stock > 50 else ""
        print(f"{name:26s} {stock:9.0f} {ours:9.0f} {ours - stock:7.0f} {ratio}")


if __name__ == "__main__":
    main()
