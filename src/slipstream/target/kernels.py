"""In which context the target's kernels run."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext

import torch

_SWITCHES = threading.Lock()
_inside = 0
_restore = ExitStack()


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Return the context for forwards on ``device``; on a CPU it does nothing. Thread-safe.

    On CUDA the device is current, because Triton launches on the current device, not the tensor's, and cuDNN's
    attention is off. cuDNN builds a plan for each new length. A cache that grows by one token a step, or documents that
    are read alone, have a new length nearly every time: 73 ms a step in bfloat16 were measured, where float32, which
    cuDNN does not take, needed 25 ms. Flash, memory-efficient and math attention stay.
    """
    return _on_cuda(device) if device.type == "cuda" else nullcontext()


@contextlib.contextmanager
def _on_cuda(device: torch.device) -> Iterator[None]:
    with torch.cuda.device(device), _without_cudnn_attention():
        yield


@contextlib.contextmanager
def _without_cudnn_attention() -> Iterator[None]:
    """The switches belong to the process, not the thread: the first to come turns cuDNN off, the last to go back on."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    global _inside
    with _SWITCHES:
        if _inside == 0:
            kept = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
            _restore.enter_context(sdpa_kernel(kept))
        _inside += 1
    try:
        yield
    finally:
        with _SWITCHES:
            _inside -= 1
            if _inside == 0:
                _restore.close()
