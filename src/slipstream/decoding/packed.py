"""Linear layers whose weights are laid out once, not in every call: what decoding on a CPU spends its time in.

A float32 product of 2 to 64 rows spends a third to a half of its time in rearranging the weight, which the library does
anew in every call, and a prompt's still a tenth. oneDNN also takes a weight that was rearranged once. The products are
the same up to the order of their sums; each layer proves it on a few rows before it is used, and stays as it is where
it cannot.

Plain and block decoding both run so, the drafter too: a speed-up is a ratio of two runs that had the same advantages.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LEAST_WEIGHTS = 2**16
"""A smaller layer is done before oneDNN has found its kernel (some 10 microseconds a call); it stays as it is."""

_TOLERANCE = 1e-5  # relative to the product's norm; orders of summation differ by less than 1e-6
_PROOF_ROWS = 3
_SHARE = 0.5  # of the free memory that the second copy of the weights may take

Forward = Callable[[Tensor], Tensor]


@contextlib.contextmanager
def packed_linears(*models: nn.Module | None) -> Iterator[str]:
    """Let the float32 linear layers of ``models`` on the CPU use rearranged copies of their weights while entered.

    Yields "" or why some or all layers are as they were; None and models elsewhere are passed over. Weights must not
    change inside. Entered again for a model that is in place, it does nothing. Thread-safe as the models' forwards are.
    """
    layers: list[Any] = [m for model in models if model is not None for m in model.modules() if _suited(m)]
    reason = _cannot(layers) if layers else ""
    changed: list[Any] = []
    try:
        if not reason:
            reason = _replace(layers, changed)
        if reason:
            print(f"linear layers are not laid out for decoding: {reason}", file=sys.stderr)
        yield reason
    finally:
        for layer in changed:
            del layer.forward


def pack(weight: Tensor, bias: Tensor | None = None) -> Forward:
    """Return ``x -> x @ weight.T + bias`` of float32 ``weight [N, K]`` on the CPU, for x ``[..., K]``.

    Raises RuntimeError where this build of torch has no such product, or where it is not the one it stands for.
    """
    operators = torch.ops.mkldnn
    with torch.inference_mode():
        arranged = operators._reorder_linear_weight(weight.detach(), 8)
        multiply = operators._linear_pointwise

        def product(x: Tensor) -> Tensor:
            out: Tensor = multiply(x, arranged, bias, "none", [], "")
            return out

        draw = torch.Generator().manual_seed(0)
        rows = torch.randn(_PROOF_ROWS, weight.shape[1], generator=draw)
        reference = F.linear(rows, weight, bias)
        apart = float((product(rows) - reference).norm() / reference.norm().clamp_min(1e-30))
    if not apart <= _TOLERANCE:
        raise RuntimeError(f"the product differs from the layer's own by {apart:.2g}")
    return product


def _suited(layer: nn.Module) -> bool:
    """Whether ``layer`` is a linear layer in float32 on the CPU, with the forward of its class."""
    if not isinstance(layer, nn.Linear) or "forward" in layer.__dict__:
        return False
    weight = layer.weight
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.numel() >= LEAST_WEIGHTS


def _cannot(layers: Sequence[Any]) -> str:
    """Return why no layer can be rearranged, or ""."""
    if not torch.backends.mkldnn.is_available():
        return "this build of torch has no oneDNN"
    needed = sum(layer.weight.numel() * 4 for layer in layers)
    free = _free_bytes()
    if free is not None and needed > _SHARE * free:
        return f"a copy of their weights takes {needed / 2**30:.1f} GiB of {free / 2**30:.1f} GiB free memory"
    return ""


def _replace(layers: Sequence[Any], changed: list[Any]) -> str:
    """Give each layer its new forward and note it in ``changed``; return why one could not, or ""."""
    for layer in layers:
        try:
            product = pack(layer.weight, layer.bias)
        except (AttributeError, RuntimeError) as error:
            return str(error).partition("\n")[0]
        layer.forward = _forward(layer.forward, product)
        changed.append(layer)
    return ""


def _forward(genuine: Forward, product: Forward) -> Forward:
    """Return the forward that takes ``product`` for float32 without gradient, and the layer's own way otherwise."""

    def forward(x: Tensor) -> Tensor:
        plain = x.dtype == torch.float32 and x.numel() > 0 and not torch.is_autocast_enabled("cpu")
        return product(x) if plain and not torch.is_grad_enabled() else genuine(x)

    return forward


def _free_bytes() -> int | None:
    """Return the machine's free memory, or None where it does not tell."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None
