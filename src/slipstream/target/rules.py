"""Which code computes the rules of recurrent layers: another package's kernels (FLA's), or transformers' own PyTorch.

transformers takes a package's kernels wherever the package can be imported, whatever the device and the dtype. Two
things are wrong with that. Both are mended call by call, so that a model on a CPU and one on a GPU may share a process:

* On a CPU, kernels of Triton raise. There transformers' own functions run.
* In float32, FLA's chunked kernels of the gated delta rule multiply in TF32, which keeps ten bits; its recurrent kernel
  sums in float32, but transformers takes it for single tokens only. Plain decoding would read by the one what block
  decoding reads by the other, a thousandth apart, and float32 would prove nothing. Calls that keep a state, which only
  decoding makes, therefore go to the recurrent kernel, however many tokens they have. It takes them one after another:
  slower for long prompts, and as exact as the dtype promises. Features are read without a state, by chunked kernels.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

_MAKER = "transformers.integrations.hub_kernels"
_CHUNKED, _STEPWISE = "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"
_SETTLING = threading.Lock()


class Rule:
    """Stands for a rule in a transformers module: each call goes to the code that suits its tensors. Thread-safe.

    kernel: what transformers would run; own: its PyTorch function of the same arguments; package: whose kernel it is;
    exact: a kernel of the same arguments that sums in float32 what ``kernel`` multiplies in TF32, or None.
    """

    def __init__(
        self,
        kernel: Callable[..., Any],
        own: Callable[..., Any],
        package: str,
        exact: Callable[..., Any] | None = None,
    ) -> None:
        self.kernel, self.own, self.package, self.exact = kernel, own, package, exact
        self._names = frozenset(inspect.signature(own).parameters)
        self._name = str(getattr(own, "__name__", "a rule")).removeprefix("torch_")
        functools.update_wrapper(self, own)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call one of the three. Raises ValueError for bounds of packed documents on a CPU, which nothing there takes.

        transformers' own function would ignore them, and its newest releases raise as well.
        """
        tensor = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        if tensor is not None and not kernels_run_on(tensor.device):
            if any(kwargs.get(name) is not None for name in ("cu_seqlens", "seq_idx")):
                raise ValueError(f"{self._name} cannot keep packed sequences apart on a CPU")
            return self.own(*args, **{name: value for name, value in kwargs.items() if name in self._names})
        keeps = kwargs.get("output_final_state") and kwargs.get("cu_seqlens") is None
        plain = tensor is not None and tensor.dtype == torch.float32 and not tensor.requires_grad
        if self.exact is not None and keeps and plain:  # the recurrent kernel has no gradient
            return self.exact(*args, **kwargs)
        return self.kernel(*args, **kwargs)


def kernels_run_on(device: torch.device) -> bool:
    """Return whether other packages' kernels can run on ``device``."""
    return device.type != "cpu"


def settle_rules(model: nn.Module) -> str:
    """Put a ``Rule`` in the place of each rule of ``model``'s layers that transformers took from another package.

    It stays: modules of the same classes use it too. Returns the packages, comma-separated; "" where transformers took
    none. Thread-safe.
    """
    homes = {type(module).__module__ for module in model.modules()}
    with _SETTLING:
        return ", ".join(sorted({package for home in homes for package in _settle(sys.modules.get(home))}))


def _settle(home: ModuleType | None) -> set[str]:
    """Do it for one Python module; return the packages."""
    names = vars(home) if home is not None else {}
    found = {name: rule for name, value in list(names.items()) if (rule := _rule_of(value)) is not None}
    chunked, stepwise = found.get(_CHUNKED), found.get(_STEPWISE)
    if chunked is not None and stepwise is not None:
        chunked.exact = stepwise.kernel
    names.update(found)
    return {rule.package for rule in found.values()}


def _rule_of(value: Any) -> Rule | None:
    """Return the rule for what transformers made of a function and a package's kernel; None for anything else."""
    if isinstance(value, Rule):
        return value
    if not isinstance(value, FunctionType) or value.__globals__.get("__name__") != _MAKER:
        return None
    held = inspect.getclosurevars(value).nonlocals
    kernel, own = held.get("implementation"), held.get("torch_function")
    if not callable(kernel) or not callable(own) or kernel is own:
        return None
    return Rule(value, own, (getattr(kernel, "__module__", None) or "another package").partition(".")[0])
