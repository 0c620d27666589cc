from __future__ import annotations

import threading

import pytest
import torch

from slipstream.compilation import stress_rounds as sr
from slipstream.compilation.dense import dense_flex_allowed


def cold(bodies, alone=None, delays=None):
    return sr.Cold(bodies=bodies, alone=alone or bodies, delays=delays or [0.0] * len(bodies))


def play(work, **changes):
    return sr.play(work, number=3, enter=lambda: None, counts=sr.Counts(), tolerance=1e-5, **changes)


def test_threads_run_at_once_and_agree_with_the_work_done_alone():
    meet = threading.Barrier(2)

    def together(value):
        def body():
            meet.wait(10)
            return [torch.tensor([value])]

        return body

    alone = [lambda: [torch.tensor([1.0])], lambda: [torch.tensor([2.0])]]
    found = play(cold([together(1.0), together(2.0)], alone))
    assert found.number == 3
    assert not found.bad


def test_an_exception_in_a_thread_is_one_line():
    def fails():
        raise ValueError("bad\nthing 0x7f3412345678 in 'thread 12'")

    found = play(cold([fails, fails], [list, list]))
    assert found.errors == ("ValueError: bad thing 0x... in 'thread 12'",) * 2


def test_values_that_differ_are_told_by_thread_and_distance():
    bodies = [lambda: [torch.zeros(2)], lambda: [torch.zeros(2), torch.ones(2)]]
    alone = [lambda: [torch.zeros(2)], lambda: [torch.zeros(2), torch.tensor([1.0, 1.5])]]
    (line,) = play(cold(bodies, alone)).wrong
    assert line == "thread 1: result 1 is off by 0.5"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_no_numbers_are_wrong(value):
    (line,) = play(cold([lambda: [torch.tensor([value])]], [lambda: [torch.zeros(1)]])).wrong
    assert line.startswith("thread 0: result 0")


def test_a_missing_result_or_another_shape_is_wrong():
    assert play(cold([list], [lambda: [torch.zeros(1)]])).wrong == ("thread 0: 0 results instead of 1",)
    (line,) = play(cold([lambda: [torch.zeros(2)]], [lambda: [torch.zeros(1)]])).wrong
    assert line == "thread 0: result 0 has shape [2] instead of [1]"


def test_every_thread_enters_before_it_works():
    entered = []
    work = cold([list, list])
    sr.play(work, number=0, enter=lambda: entered.append(threading.get_ident()), counts=sr.Counts(), tolerance=0)
    assert len(set(entered)) == 2


def test_a_guard_that_is_not_in_force_is_an_error_of_the_round():
    def enter():
        raise RuntimeError("not held")

    found = sr.play(cold([list]), number=0, enter=enter, counts=sr.Counts(), tolerance=0)
    assert found.errors == ("RuntimeError: not held",)


def test_a_thread_that_cannot_enter_does_not_keep_those_waiting_that_wait_for_its_body():
    ended = threading.Event()

    def enter():
        if threading.current_thread().name == "stress-0":
            raise RuntimeError("not in force")

    def first():
        ended.set()
        return []

    def second():
        assert ended.wait(10)
        return []

    found = sr.play(cold([first, second]), number=0, enter=enter, counts=sr.Counts(), tolerance=0.0)
    assert found.errors == ("RuntimeError: not in force",)


def test_dense_calls_are_counted_but_not_those_that_a_check_makes_on_purpose():
    from torch.nn.attention import flex_attention as flex

    counts = sr.Counts()
    setup = flex.setup_compilation_env
    counts.watch_flex()
    try:
        x = torch.zeros(1, 1, 1, 16)
        with dense_flex_allowed():  # another test of this process may have installed the guard
            flex.flex_attention(x, x, x)
            with counts.paused():
                flex.flex_attention(x, x, x)
    finally:
        flex.setup_compilation_env = setup
    assert counts.take() == (1, 0, 0)
    assert counts.take() == (0, 0, 0)


def test_benches_are_counted_by_kernel_key_and_configuration():
    pytest.importorskip("triton")
    import triton
    from triton.runtime.autotuner import Autotuner

    from slipstream.compilation.stress_kernels import FakeKernel

    counts = sr.Counts()
    bench = counts.counting(lambda call, quantiles=None: [1.0, 1.0, 1.0])
    configs = [triton.Config({}, num_warps=w) for w in (1, 2)]

    def tuner():
        return Autotuner(FakeKernel(), ["x", "y", "n"], configs, ["n"], None, None, do_bench=bench)

    first = tuner()
    for n in (1, 2, 1):
        first.run(torch.zeros(4), torch.zeros(4), n)
    tuner().run(torch.zeros(4), torch.zeros(4), 1)
    assert counts.take() == (0, 6, 6)
    first.cache.clear()
    first.run(torch.zeros(4), torch.zeros(4), 1)
    first.cache.clear()
    first.run(torch.zeros(4), torch.zeros(4), 1)
    assert counts.take() == (0, 4, 2)
