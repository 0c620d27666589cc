"""Tuning results of real Triton tuners, over kernels and timings that are made up."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from slipstream.compilation import tuning_results as results

triton = pytest.importorskip("triton")
from triton.runtime.autotuner import Autotuner  # noqa: E402


class Kernel:
    """Stands in for a compiled kernel."""

    def __init__(self, name: str = "scale", source: str = "s1") -> None:
        def scale(x: Any, n: Any, kind: Any) -> None:
            """Counted only."""

        scale.__qualname__ = name
        self.fn, self.arg_names, self.source = scale, ["x", "n", "kind"], source
        self.launched: list[dict[str, Any]] = []
        self.digests = 0

    @property
    def cache_key(self) -> str:
        self.digests += 1
        return self.source

    def run(self, *args: Any, **kwargs: Any) -> None:
        self.launched.append(kwargs)


class Bench:
    """Times by block size: the largest is the fastest. ``calls``: how often something was timed."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, call: Any, quantiles: Any = None) -> list[float]:
        self.calls += 1
        return [1.0 / self.calls] * 3  # the last that is timed wins


def configs(*sizes: int, **more: Any) -> list[Any]:
    return [triton.Config({"BLOCK": size}, num_warps=2, **more) for size in sizes]


def tuner(bench: Bench, kernel: Kernel | None = None, sizes: tuple[int, ...] = (16, 32, 64), **more: Any) -> Any:
    kernel = kernel or Kernel()
    return Autotuner(kernel, kernel.arg_names, configs(*sizes, **more), ["n", "kind"], None, None, do_bench=bench)


@pytest.fixture(autouse=True)
def _nothing_pending() -> Iterator[None]:
    gc.collect()  # tuners hold themselves, and are found as long as they live
    results.forget()
    yield
    results.forget()


def tuned(**kernel: str) -> tuple[Any, bytes]:
    made = tuner(Bench(), Kernel(**kernel))
    made.run(1, 128, "fast")
    made.run(1, 256, None)
    return made, results.encode(results.collect())


def test_results_survive_a_process_and_nothing_is_timed_again() -> None:
    first, written = tuned()
    del first
    bench = Bench()
    later = tuner(bench)
    results.restore(results.decode(written))
    assert results.restored() == 0
    later.run(1, 128, "fast")
    assert results.restored() == 2
    later.run(1, 256, None)
    assert bench.calls == 0
    assert later.best_config.kwargs == {"BLOCK": 64}
    assert later.best_config is later.configs[2]  # the tuner's own, with whatever hooks it has
    later.run(1, 512, None)
    assert bench.calls == 3


def test_a_tuner_that_is_made_later_has_them_from_the_start() -> None:
    first, written = tuned()
    del first
    results.restore(results.decode(written))
    bench = Bench()
    later = tuner(bench)
    later.run(1, 128, "fast")
    assert bench.calls == 0
    assert results.restored() == 2


def test_subclasses_as_fla_has_are_found() -> None:
    class CachedAutotuner(Autotuner):
        pass

    kernel, bench = Kernel("sub"), Bench()
    made = CachedAutotuner(kernel, kernel.arg_names, configs(16, 32), ["n"], None, None, do_bench=bench)
    made.run(1, 7, None)
    (found,) = [r for r in results.collect() if r["kernel"].endswith("sub")]
    assert found["key"] == [7]
    assert found["config"]["kwargs"] == {"BLOCK": 32}


def test_what_is_written_is_plain_json() -> None:
    _, written = tuned()
    found = json.loads(written)
    assert {"kernel", "arguments", "keys", "source", "key", "config"} == set(found[0])


def test_another_source_of_the_kernel_is_left_alone() -> None:
    first, written = tuned(source="s1")
    del first
    bench = Bench()
    later = tuner(bench, Kernel(source="s2"))
    results.restore(results.decode(written))
    later.run(1, 128, "fast")
    assert (bench.calls, results.restored()) == (3, 0)


def test_a_configuration_that_the_tuner_does_not_have_is_left_alone() -> None:
    first, written = tuned()
    del first
    bench = Bench()
    later = tuner(bench, sizes=(16, 32))
    results.restore(results.decode(written))
    later.run(1, 128, "fast")
    assert (bench.calls, results.restored()) == (2, 0)


def test_a_choice_that_was_made_here_is_kept() -> None:
    first, written = tuned()
    first.cache[(128, "fast")] = first.configs[0]
    results.restore(results.decode(written))
    assert (999, "fast") not in first.cache
    assert first.cache[(128, "fast")] is first.configs[0]


def test_keys_that_json_cannot_hold_are_counted_and_left_out() -> None:
    first = tuner(Bench(), Kernel("odd"))
    first.cache[(object(), 1)] = first.configs[0]
    first.cache[(float("nan"), 2)] = first.configs[0]
    first.cache[(1, 1)] = first.configs[0]
    assert [r["key"] for r in results.collect() if r["kernel"].endswith("odd")] == [[1, 1]]


def test_numbers_truth_values_and_none_come_back_as_they_were() -> None:
    first = tuner(Bench(), Kernel("types"))
    keys = [(True, "a"), (0, None), (0.5, "torch.float32")]
    for key in keys:
        first.cache[key] = first.configs[1]
    written = results.encode(results.collect())
    first.cache.clear()
    results.restore(results.decode(written))
    assert (1, 1) not in first.cache
    assert {(k, tuple(map(type, k))) for k in first.cache} == {(k, tuple(map(type, k))) for k in keys}


def test_a_source_is_digested_at_the_first_launch_and_not_before() -> None:
    # A digest fixes the globals that a kernel sees: those that change later would be an error of Triton's.
    first, written = tuned()
    del first
    results.restore(results.decode(written))
    kernel = Kernel()
    later = tuner(Bench(), kernel)
    results.restore(results.decode(written))
    assert kernel.digests == 0
    later.run(1, 128, "fast")
    later.run(1, 256, None)
    assert kernel.digests == 1


def test_a_tuner_with_results_can_be_copied() -> None:
    first, written = tuned()
    del first
    results.restore(results.decode(written))
    later = tuner(Bench())
    later.run(1, 128, "fast")
    assert type(copy.copy(later.cache)) is dict
    assert copy.deepcopy(later.cache).keys() == later.cache.keys()
    assert pickle.loads(pickle.dumps(dict(later.cache))).keys() == later.cache.keys()


def test_threads_that_launch_at_once_take_the_results_up_once() -> None:
    first, written = tuned()
    del first
    results.restore(results.decode(written))
    for _ in range(50):
        bench = Bench()
        later = tuner(bench)
        before, start = results.restored(), threading.Barrier(4)

        def launch(tuner: Any = later, start: Any = start) -> None:
            start.wait()
            assert (128, "fast") in tuner.cache

        with ThreadPoolExecutor(4) as pool:
            for done in [pool.submit(launch) for _ in range(4)]:
                done.result()
        assert results.restored() - before == 2


@pytest.mark.parametrize("bad", [b"", b"{", b"[1]", b'[{"kernel": 1}]', b"\xff", b"{}"])
def test_a_section_that_is_no_list_of_results_is_an_error(bad: bytes) -> None:
    with pytest.raises(ValueError):
        results.decode(bad)


def test_tuners_of_a_kernel_over_heuristics_are_known_by_the_kernel() -> None:
    kernel = Kernel("inner")

    class Heuristics:
        fn, arg_names = kernel, kernel.arg_names

        def run(self, *args: Any, **kwargs: Any) -> None: ...

    made = Autotuner(Heuristics(), kernel.arg_names, configs(1, 2), ["n"], None, None, do_bench=Bench())
    made.cache[(3,)] = made.configs[0]
    (found,) = [r for r in results.collect() if r["kernel"].endswith("inner")]
    assert found["source"] == "s1"


def test_results_wait_for_triton_to_be_imported() -> None:
    code = """
        import sys
        from slipstream.compilation import tuning_results as results
        record = {"kernel": "__main__.f", "arguments": ["x"], "keys": ["x"], "source": "", "key": [1],
                  "config": {"kwargs": {"B": 2}, "num_warps": 4, "num_stages": 3, "num_ctas": 1}}
        results.restore([record])
        assert "triton" not in sys.modules
        assert results.collect() == []
        import triton
        from triton.runtime.autotuner import Autotuner
        def f(x): pass
        class K: fn, arg_names = staticmethod(f), ["x"]
        t = Autotuner(K(), ["x"], [triton.Config({"B": 1}), triton.Config({"B": 2})], ["x"], None, None)
        assert (1,) in t.cache and t.cache[(1,)] is t.configs[1], t.cache
    """
    assert subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=False).returncode == 0
