"""Another package's kernels without package and GPU: transformers' own wrapper around functions of a test."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

PACKAGE = "kernels_of_a_test"
CHUNKED, RECURRENT = "chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"
_NAMES = {CHUNKED: "torch_chunk_gated_delta_rule", RECURRENT: "torch_recurrent_gated_delta_rule"}
_HOME = "transformers.models.qwen3_5.modeling_qwen3_5"


def own_rule(name: str) -> Callable[..., Any]:
    """Return transformers' PyTorch function that stands in for a package's ``name``, in Qwen3.5."""
    return inspect.unwrap(getattr(importlib.import_module(_HOME), _NAMES[name]))


def take_kernels(monkeypatch: pytest.MonkeyPatch, **kernels: Callable[..., Any]) -> None:
    """Have Qwen3.5 take ``kernels``, by the package's names for them, until the test ends."""
    from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback

    home = importlib.import_module(_HOME)
    package: Any = ModuleType(PACKAGE)
    package.ops = SimpleNamespace(gated_delta_rule=SimpleNamespace(**kernels))
    vars(package).update(kernels)
    monkeypatch.setitem(sys.modules, PACKAGE, package)
    for name, kernel in kernels.items():
        kernel.__module__ = f"{PACKAGE}.ops"
        wrapped = use_kernel_func_from_hub_with_fallback(name, PACKAGE)(own_rule(name))
        assert inspect.getclosurevars(wrapped).nonlocals["implementation"] is kernel
        monkeypatch.setattr(home, _NAMES[name], wrapped)


def kernel_of(rule: Callable[..., Any], prepare: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """Return ``rule`` with FLA's signature; queries, keys, values and state go through ``prepare``."""

    def kernel(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        scale: float | None = None,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        cu_seqlens: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        assert scale is None
        assert not kwargs
        return rule(
            *(prepare(x) for x in (q, k, v)),
            g=g,
            beta=beta,
            initial_state=None if initial_state is None else prepare(initial_state),
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        )

    return kernel


def refuse_cpu(tensor: Tensor) -> Tensor:
    """Raise as Triton does for a tensor on a CPU."""
    if tensor.device.type == "cpu":
        raise ValueError("Pointer argument (at 0) cannot be accessed from Triton (cpu tensor?)")
    return tensor


def to_tensor_float(tensor: Tensor) -> Tensor:
    """Return float32 numbers rounded to TF32's ten bits of mantissa."""
    bits = tensor.contiguous().view(torch.int32)
    return ((bits + (1 << 12)) & ~((1 << 13) - 1)).view(torch.float32)
