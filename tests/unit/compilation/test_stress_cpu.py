from __future__ import annotations

import threading

import pytest
import torch

from slipstream.compilation import stress_cpu as sc
from slipstream.compilation.stress_rounds import Counts


def test_inputs_depend_on_seed_round_and_thread_only():
    def drawn(seed, number, thread):
        return sc.numbers(seed, number, thread)(3)

    assert torch.equal(drawn(1, 2, 3), drawn(1, 2, 3))
    different = [drawn(s, n, t) for s in (0, 1) for n in (0, 1) for t in (0, 1)]
    assert len({tuple(x.tolist()) for x in different}) == 8


def test_a_fresh_function_does_the_same_with_code_of_its_own():
    first, second = sc.fresh(sc._network), sc.fresh(sc._network)
    assert first.__code__ is not second.__code__
    x, w = torch.randn(2, 8), torch.randn(8, 8)
    assert torch.equal(first(x, w), sc._network(x, w))


def test_gradients_are_those_of_the_squared_sum():
    out, grad = sc.gradients(lambda x: 2 * x, [torch.tensor([3.0])])
    assert (out.item(), grad.item()) == (6.0, 24.0)


def test_the_looping_thread_goes_on_until_the_others_have_ended_or_raised():
    others = sc.Others(2)

    def fails():
        raise ValueError

    assert others.one(list)() == []
    assert not others.done.is_set()
    with pytest.raises(ValueError):
        others.one(fails)()
    assert others.done.is_set()
    assert sc.Others(0).done.is_set()


def test_a_later_result_that_differs_is_what_the_looping_thread_returns():
    done, calls = threading.Event(), []

    def call():
        calls.append(1)
        if len(calls) == 4:
            done.set()
        return [torch.tensor([1.0 if len(calls) != 3 else 2.0])]

    assert sc.until(done, call)[0].item() == 2.0


@pytest.mark.parametrize("kind", sc.WORKLOADS, ids=lambda kind: kind.name)
def test_each_workload_hands_out_a_body_and_a_reference_for_each_thread(kind):
    work = kind()
    if work.lacking():
        pytest.skip(work.lacking())
    work.guard, work.counts = False, Counts()
    cold = work.cold(number=1, seed=0, threads=3)
    assert len(cold.bodies) == len(cold.alone) == len(cold.delays) == 3
    results = cold.alone[-1]()
    assert results
    assert all(torch.isfinite(r.float()).all() for r in results)
