"""The parts of the GPU workloads that need no GPU."""

from __future__ import annotations

import pytest
import torch

from slipstream.compilation.stress_cuda import Fla
from slipstream.compilation.stress_rounds import Counts


class _Refused(torch.autograd.Function):
    message = ""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(_Refused.message)


def work() -> Fla:
    made = Fla()
    made.guard, made.counts = True, Counts()
    return made


def test_a_backward_that_fla_refuses_is_left_out_and_said() -> None:
    fla = work()
    _Refused.message = "Triton on Hopper GPUs produces incorrect results for gated chunk_bwd_dqkwg"
    for _ in range(2):
        (out,) = fla._gradients(_Refused.apply, [torch.ones(3)])
        assert out.tolist() == [2, 2, 2]
    (told,) = fla.counts.take_left_out()
    assert "incorrect results" in told
    assert fla.counts.take_left_out() == ()


def test_any_other_failure_of_the_backward_is_one() -> None:
    fla = work()
    _Refused.message = "something else"
    with pytest.raises(RuntimeError, match="something else"):
        fla._gradients(_Refused.apply, [torch.ones(3)])
    assert fla.counts.take_left_out() == ()


def test_gradients_otherwise() -> None:
    out, gradient = work()._gradients(lambda x: x * 3, [torch.ones(2)])
    assert out.tolist() == [3, 3]
    assert gradient.tolist() == [18, 18]
