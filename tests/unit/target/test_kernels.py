from __future__ import annotations

import contextlib
import threading

import pytest
import torch

from slipstream.target.kernels import on_device

CUDA = torch.device("cuda", 1)


def enabled() -> dict[str, bool]:
    cuda = torch.backends.cuda
    return {
        "cudnn": cuda.cudnn_sdp_enabled(),
        "flash": cuda.flash_sdp_enabled(),
        "efficient": cuda.mem_efficient_sdp_enabled(),
        "math": cuda.math_sdp_enabled(),
    }


ALL = dict.fromkeys(("cudnn", "flash", "efficient", "math"), True)


@pytest.fixture
def current(monkeypatch) -> list[torch.device]:
    """Devices that are current, on a machine without any."""
    stack: list[torch.device] = []

    @contextlib.contextmanager
    def device(which):
        stack.append(which)
        yield
        stack.remove(which)

    monkeypatch.setattr(torch.cuda, "device", device)
    assert enabled() == ALL
    return stack


def test_on_a_cpu_nothing_is_entered(current):
    context = on_device(torch.device("cpu"))
    assert isinstance(context, contextlib.nullcontext)
    with context:
        assert current == []
        assert enabled() == ALL


def test_on_cuda_the_device_is_current_and_only_cudnn_attention_is_off(current):
    with on_device(CUDA):
        assert current == [CUDA]
        assert enabled() == {**ALL, "cudnn": False}
        with on_device(CUDA):
            assert enabled() == {**ALL, "cudnn": False}
        assert enabled() == {**ALL, "cudnn": False}
    assert current == []
    assert enabled() == ALL


def test_an_error_inside_leaves_the_switches_as_they_were(current):
    with pytest.raises(ZeroDivisionError), on_device(CUDA):
        1 / 0  # noqa: B018
    assert enabled() == ALL


def test_threads_that_overlap_leave_the_switches_as_they_were(current):
    """The switches are the process's: the first to leave must not turn cuDNN on for the other, nor the last off."""
    inside, leave, seen = threading.Event(), threading.Event(), []

    def work() -> None:
        with on_device(CUDA):
            inside.set()
            leave.wait(10)
            seen.append(enabled()["cudnn"])

    thread = threading.Thread(target=work)
    with on_device(CUDA):
        thread.start()
        assert inside.wait(10)
    assert enabled()["cudnn"] is False
    leave.set()
    thread.join()
    assert seen == [False]
    assert enabled() == ALL
