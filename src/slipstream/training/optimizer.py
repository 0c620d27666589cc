"""AdamW, or Muon and AdamW, on float32 master weights: the schedule, and one guarded update.

The gradient of a step is the sum over its micro-batches and draws of the gradient of ``loss_sum``, divided by the sum
of their weights. So neither accumulation nor the number of anchors that a micro-batch happens to hold changes it.

A step whose loss or gradient is not finite freezes the run on the device: a flag makes the optimizer skip that update
and every later one, so the weights stay those that met the bad batch. The host reads the flag where it reads metrics
anyway; no step waits for the GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from slipstream.config import TrainingConfig
from slipstream.errors import CheckpointError, TrainingError
from slipstream.training.hardware import resolve_precision
from slipstream.training.muon import MuonAdamW

MOMENTS = ("exp_avg", "exp_avg_sq", "step")
MOMENTUM = ("momentum_buffer",)


def build_optimizer(draft_model: nn.Module, settings: TrainingConfig) -> torch.optim.Optimizer:
    """Return fused AdamW over the drafter's parameters, or Muon for its matrices; weight decay on matrices only.

    Muon takes ``fc`` too: its input is dense activations and its output is normed, so it is a hidden matrix like any
    other. What Muon is not for, embedding and head, the drafter borrows. Its products are made in the drafter's dtype.

    Raises TrainingError for a parameter that is not float32: bfloat16 weights lose small updates (norms stop moving).
    """
    trainable = [(name, p) for name, p in draft_model.named_parameters() if p.requires_grad]
    for name, parameter in trainable:
        if parameter.dtype != torch.float32:
            raise TrainingError(f"drafter parameter {name} is {parameter.dtype}; master weights must be float32")
    matrices = [p for _, p in trainable if p.dim() >= 2]
    vectors = [p for _, p in trainable if p.dim() < 2]
    betas = (settings.beta1, settings.beta2)
    if settings.optimizer == "muon":
        return MuonAdamW(
            matrices,
            vectors,
            muon_learning_rate=settings.muon_learning_rate,
            momentum=settings.muon_momentum,
            weight_decay=settings.weight_decay,
            learning_rate=settings.learning_rate,
            betas=betas,
            precision=resolve_precision(settings.precision, matrices[0].device),
        )
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.learning_rate,
        betas=betas,
        fused=True,
    )


def state_bytes(shapes: Iterable[Sequence[int]], settings: TrainingConfig) -> int:
    """Return the bytes of optimizer state for parameters of these shapes, step counts not counted: two float32 moments
    of each weight, or one momentum of each weight of a matrix that Muon has."""
    return sum(math.prod(shape) * (4 if settings.optimizer == "muon" and len(shape) >= 2 else 8) for shape in shapes)


def schedule_factor(progress: float, settings: TrainingConfig) -> float:
    """Return the learning rate as a share of its peak, at ``progress`` 0..1 (of steps or time, whichever leads).

    Rises linearly over ``warmup_ratio``; then ``cosine`` falls to ``min_lr_ratio`` at 1, while ``wsd`` stays at the
    peak and falls by a cosine over the last ``decay_ratio``.
    """
    progress = min(max(progress, 0.0), 1.0)
    if progress < settings.warmup_ratio:
        return progress / settings.warmup_ratio
    start = settings.warmup_ratio
    if settings.schedule == "wsd":
        start = max(start, 1.0 - settings.decay_ratio)
    if progress <= start:
        return 1.0
    done = (progress - start) / (1.0 - start)
    return settings.min_lr_ratio + (1.0 - settings.min_lr_ratio) * 0.5 * (1.0 + math.cos(math.pi * done))


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """The first step (0-based) whose loss or gradient norm was not finite. The weights are those it started from."""

    step: int
    loss: float
    grad_norm: float


class Updater:
    """Divide, clip and apply the summed gradients, unless they are unusable. One per drafter; not thread-safe.

    The optimizer's learning rates, as they are here, are the peaks that ``apply`` takes a share of.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, clip_norm: float) -> None:
        self.optimizer = optimizer
        self.peaks: list[float] = [group["lr"] for group in optimizer.param_groups]
        self.clip_norm = clip_norm
        self.parameters: list[nn.Parameter] = [p for group in optimizer.param_groups for p in group["params"]]
        device = self.parameters[0].device
        self._fault = torch.full((3,), -1.0, dtype=torch.float64, device=device)  # step (-1: none), loss, gradient norm
        self._zero = torch.zeros((), device=device)

    def gradients(self) -> list[Tensor]:
        """Return the gradient of each parameter, in an order that every rank has; zeros where there was none."""
        for parameter in self.parameters:
            if parameter.grad is None:  # an empty micro-batch may leave no graph to run backward through
                parameter.grad = torch.zeros_like(parameter)
        return [p.grad for p in self.parameters if p.grad is not None]

    def apply(self, *, step: int, factor: float, loss_sum: Tensor, weight_sum: Tensor) -> Tensor:
        """Apply the gradients of one step and clear them. Returns the norm before clipping, 0-d, on the device.

        ``loss_sum`` and ``weight_sum`` (0-d) are totals over the step. Without any weight (no valid anchor at all) the
        gradient is zero and the update is skipped, moments included. No host sync.
        """
        grads = self.gradients()
        some = weight_sum > 0
        divisor = torch.where(some, weight_sum, torch.ones_like(weight_sum)).float()
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads))) / divisor
        loss = loss_sum.detach().double() / divisor
        healthy = torch.isfinite(norm) & torch.isfinite(loss) & torch.isfinite(weight_sum)
        seen = torch.stack([torch.full_like(loss, float(step)), loss, norm.double()])
        self._fault = torch.where((self._fault[0] < 0) & ~healthy, seen, self._fault)
        torch._foreach_mul_(grads, torch.clamp(self.clip_norm / (norm + 1e-6), max=1.0) / divisor)
        for group, peak in zip(self.optimizer.param_groups, self.peaks, strict=True):
            group["lr"] = peak * factor
        skip = (self._fault[0] >= 0) | ~some
        # Fused AdamW and our Muon read this on the device, and leave weights, state and step counts as they were.
        self.optimizer.found_inf = skip.float()  # type: ignore[attr-defined]
        self.optimizer.grad_scale = None  # type: ignore[attr-defined]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return torch.where(some, norm, self._zero)

    def fault(self) -> Fault | None:
        """Read the flag: the first step that was not finite, or None. Waits for the device."""
        step, loss, norm = self._fault.tolist()
        return None if step < 0 else Fault(step=int(step), loss=loss, grad_norm=norm)


def _state_names(optimizer: torch.optim.Optimizer) -> dict[nn.Parameter, tuple[str, ...]]:
    """Return the names of the state that each parameter has."""
    return {
        parameter: MOMENTUM if "momentum" in group else MOMENTS
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


def optimizer_tensors(draft_model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the state as ``exp_avg.<parameter>``, ``momentum_buffer.<parameter>`` and so on; parameters never updated
    have none."""
    names = _state_names(optimizer)
    out: dict[str, Tensor] = {}
    for name, parameter in draft_model.named_parameters():
        state = optimizer.state.get(parameter, {})
        for key in names.get(parameter, ()):
            if key in state:
                out[f"{key}.{name}"] = state[key].detach()
    return out


def restore_optimizer(draft_model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Put back what ``optimizer_tensors`` returned. Raises CheckpointError where a tensor does not fit."""
    if not tensors:
        return
    names = _state_names(optimizer)
    expected = {f"{key}.{name}" for name, p in draft_model.named_parameters() for key in names.get(p, ())}
    strange = sorted(set(tensors) ^ expected)
    if strange:
        raise CheckpointError(f"optimizer state and drafter disagree about {strange[0]} ({len(strange)} such tensors)")
    for name, parameter in draft_model.named_parameters():
        if parameter not in names:
            continue
        state: dict[str, Tensor] = {}
        for key in names[parameter]:
            value = tensors[f"{key}.{name}"]
            if key != "step" and value.shape != parameter.shape:
                raise CheckpointError(
                    f"optimizer state {key}.{name} is {tuple(value.shape)}, not {tuple(parameter.shape)}"
                )
            state[key] = value.to(parameter.device, copy=True)
        optimizer.state[parameter] = state


def assert_full_precision(draft_model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise TrainingError unless parameters and optimizer state are float32 (before step 0 and after a resume)."""
    for name, parameter in draft_model.named_parameters():
        if parameter.dtype != torch.float32:
            raise TrainingError(f"drafter parameter {name} is {parameter.dtype}; master weights must be float32")
    for name, tensor in optimizer_tensors(draft_model, optimizer).items():
        if tensor.dtype != torch.float32:
            raise TrainingError(f"optimizer state {name} is {tensor.dtype}; it must be float32")
