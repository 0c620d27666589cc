"""Muon for matrices beside AdamW for everything else, with an update that is skipped on the device.

A matrix W [A, B] with gradient G keeps one momentum M [A, B], all of it float32 (K. Jordan et al., "Muon: An optimizer
for hidden layers in neural networks", kellerjordan.github.io/posts/muon, 2024)::

    M <- mu M + (1 - mu) G
    U  = NS((1 - mu) G + mu M)                               Nesterov's momentum
    W <- (1 - lr decay) W - lr sqrt(max(1, A/B)) U           the article's scale

NS brings every singular value near 1: X = G/|G|, then five times X <- a X + (b XX' + c (XX')^2) X. Values are those of
``torch.optim.Muon(..., adjust_lr_fn="original")``, which is not used itself: it cannot leave a step out without asking
the device, and it runs some twenty kernels for each matrix where here matrices of one shape share them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

# The article's, which torch has too: the steepest quintic at 0 that stays within about 0.7 .. 1.2 near 1.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
EPS = 1e-7
# Elements that are orthogonalised at once. Small matrices share kernels; a large one fills the device alone, and more
# of them would only need more memory (about 16 bytes an element for a moment).
BATCH_ELEMENTS = 2**26


def orthogonalise(matrices: Tensor) -> Tensor:
    """Return NS of each of the matrices [n, A, B], in their dtype, which all products are made in; 0 stays 0."""
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices  # the smaller square product
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=EPS)
    for _ in range(ITERATIONS):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def orthogonalisation_flops(shapes: Iterable[Sequence[int]]) -> int:
    """Return the floating-point operations of NS for all matrices among the shapes: what Muon adds to each step.

    Of a matrix n by m, n <= m, an iteration multiplies (n, m) by (m, n), (n, n) by itself, and (n, n) by (n, m).
    """
    sides = (sorted(shape) for shape in shapes if len(shape) == 2)
    return sum(ITERATIONS * (4 * n * n * m + 2 * n**3) for n, m in sides)


def batches(matrices: Sequence[nn.Parameter], elements: int = BATCH_ELEMENTS) -> list[list[nn.Parameter]]:
    """Return the matrices in lists of one shape and at most ``elements`` elements (one matrix at least), in order."""
    shapes: dict[tuple[int, ...], list[nn.Parameter]] = defaultdict(list)
    for matrix in matrices:
        shapes[tuple(matrix.shape)].append(matrix)
    found = []
    for shape, members in shapes.items():
        most = max(elements // max(math.prod(shape), 1), 1)
        found += [members[at : at + most] for at in range(0, len(members), most)]
    return found


class MuonAdamW(torch.optim.Optimizer):
    """Muon on ``matrices`` (2-D), fused AdamW without weight decay on ``others``; neither may be empty.

    The first parameter group, the one with ``momentum``, is Muon's, its state ``momentum_buffer``; then AdamW's.
    Where ``found_inf`` (float32 0-d, on the device) is 1, weights and state stay as they were, to the bit; None: always
    updated. No host sync. Not thread-safe. ``precision``: dtype of NS, the one that the drafter computes in. bfloat16
    is what the article takes: an error of 1 in 256 is small beside singular values that end between 0.7 and 1.2.
    """

    found_inf: Tensor | None = None
    grad_scale: Tensor | None = None

    def __init__(
        self,
        matrices: Sequence[nn.Parameter],
        others: Sequence[nn.Parameter],
        *,
        muon_learning_rate: float,
        momentum: float,
        weight_decay: float,
        learning_rate: float,
        betas: tuple[float, float],
        precision: torch.dtype,
    ) -> None:
        settings = {"lr": muon_learning_rate, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__([{"params": list(matrices)}], settings)
        self.adamw = torch.optim.AdamW(list(others), lr=learning_rate, betas=betas, weight_decay=0.0, fused=True)
        self.adamw.state = self.state
        # The same dictionaries: a learning rate that is set here is set there.
        self.param_groups.extend(self.adamw.param_groups)
        self.precision = precision
        self._batches = batches(matrices)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient, once; ``closure`` is not called."""
        self.adamw.found_inf = self.found_inf  # type: ignore[attr-defined]
        self.adamw.grad_scale = None  # type: ignore[attr-defined]
        self.adamw.step()
        skip = None if self.found_inf is None else self.found_inf > 0
        for batch in self._batches:
            matrices: list[Tensor] = [p for p in batch if p.grad is not None]
            if matrices:
                self._update(matrices, skip)

    def _update(self, matrices: list[Tensor], skip: Tensor | None) -> None:
        """Update matrices of one shape. New values are made beside the old ones, so that a flag can choose."""
        group = self.param_groups[0]
        rate, share = group["lr"], group["momentum"]
        gradients = [p.grad for p in matrices if p.grad is not None]
        momenta = []
        for matrix in matrices:
            state = self.state[matrix]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(matrix)
            momenta.append(state["momentum_buffer"])
        mixed = torch._foreach_lerp(momenta, gradients, 1 - share)
        ahead = torch.stack(torch._foreach_lerp(gradients, mixed, share))
        update = orthogonalise(ahead.to(self.precision)).float()
        rows, columns = matrices[0].shape
        moved = torch._foreach_mul(matrices, 1 - rate * group["weight_decay"])
        torch._foreach_add_(moved, list(update.unbind()), alpha=-rate * math.sqrt(max(1, rows / columns)))
        for old, new in zip([*matrices, *momenta], [*moved, *mixed], strict=True):
            if skip is None:
                old.copy_(new)
            else:  # a product with 0 would keep what is not finite
                torch.where(skip, old, new, out=old)
