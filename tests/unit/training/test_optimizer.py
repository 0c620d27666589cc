"""Master weights, schedule, and the guarded update."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.config import TrainingConfig
from slipstream.errors import CheckpointError, TrainingError
from slipstream.training.optimizer import (
    Updater,
    assert_full_precision,
    build_optimizer,
    optimizer_tensors,
    restore_optimizer,
    schedule_factor,
    state_bytes,
)


def model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3))


BOTH = pytest.mark.parametrize("optimizer", ["adamw", "muon"])


def updater(net: nn.Module, **changes: Any) -> Updater:
    settings = TrainingConfig(**{"learning_rate": 0.01, **changes})
    return Updater(build_optimizer(net, settings), clip_norm=settings.clip_norm)


def snapshot(net: nn.Module, up: Updater) -> dict[str, torch.Tensor]:
    state = {**net.state_dict(), **optimizer_tensors(net, up.optimizer)}
    return {k: v.clone() for k, v in state.items()}


def weighted_losses(net: nn.Module, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (net(x).pow(2).sum(dim=1) * w).sum()


def step(net: nn.Module, up: Updater, number: int, loss: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    loss.backward()
    return up.apply(step=number, factor=1.0, loss_sum=loss, weight_sum=weight)


def test_cosine_rises_then_falls_to_the_floor():
    settings = TrainingConfig(warmup_ratio=0.1, min_lr_ratio=0.1)
    assert schedule_factor(0.05, settings) == pytest.approx(0.5)
    assert schedule_factor(0.1, settings) == 1.0
    assert schedule_factor(0.55, settings) == pytest.approx(0.55)
    assert schedule_factor(1.0, settings) == pytest.approx(0.1)
    assert schedule_factor(3.0, settings) == pytest.approx(0.1)
    values = [schedule_factor(p / 100, settings) for p in range(10, 101)]
    assert values == sorted(values, reverse=True)


def test_wsd_is_flat_until_its_decay():
    settings = TrainingConfig(schedule="wsd", warmup_ratio=0.1, decay_ratio=0.2, min_lr_ratio=0.0)
    assert {schedule_factor(p / 100, settings) for p in range(10, 81)} == {1.0}
    assert schedule_factor(0.9, settings) == pytest.approx(0.5)
    assert schedule_factor(1.0, settings) == pytest.approx(0.0)


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
@pytest.mark.parametrize(("warmup", "decay"), [(0.0, 0.0), (1.0, 0.5), (0.6, 1.0), (0.0, 1.0)])
def test_schedule_has_no_gap_at_its_edges(schedule: str, warmup: float, decay: float):
    settings = TrainingConfig(schedule=schedule, warmup_ratio=warmup, decay_ratio=decay, min_lr_ratio=0.1)
    assert all(0.0 <= schedule_factor(p / 50, settings) <= 1.0 for p in range(51))


def test_bfloat16_parameters_are_refused():
    with pytest.raises(TrainingError, match=r"0\.weight is torch.bfloat16; master weights must be float32"):
        build_optimizer(model().bfloat16(), TrainingConfig())


def test_weight_decay_is_for_matrices_only():
    optimizer = build_optimizer(model(), TrainingConfig(weight_decay=0.1))
    for group in optimizer.param_groups:
        assert all((p.dim() >= 2) == (group["weight_decay"] == 0.1) for p in group["params"])


def test_accumulation_and_uneven_weights_do_not_change_the_gradient():
    x, w = torch.randn(12, 4), torch.rand(12) * (torch.arange(12) % 3 > 0)
    nets = [model(), model()]
    ups = [updater(n) for n in nets]
    norm = step(nets[0], ups[0], 0, weighted_losses(nets[0], x, w), w.sum())
    total, weight = torch.zeros(()), torch.zeros(())
    for rows in (slice(0, 1), slice(1, 5), slice(5, 12)):  # the first piece has no weight at all
        loss = weighted_losses(nets[1], x[rows], w[rows])
        loss.backward()
        total, weight = total + loss.detach(), weight + w[rows].sum()
    pieces = ups[1].apply(step=0, factor=1.0, loss_sum=total, weight_sum=weight)
    torch.testing.assert_close(pieces, norm)
    for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        torch.testing.assert_close(a, b)
    # and it is the gradient of the weighted mean
    plain = model()
    (weighted_losses(plain, x, w) / w.sum()).backward()
    expected = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in plain.parameters()]))
    torch.testing.assert_close(norm, expected)


def test_clipping_and_update_equal_plain_torch():
    x, w = torch.randn(6, 4), torch.ones(6)
    net, plain = model(), model()
    up = updater(net, clip_norm=0.05)
    reference = torch.optim.AdamW(plain.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.0)
    for number in range(4):
        step(net, up, number, weighted_losses(net, x, w), w.sum())
        (weighted_losses(plain, x, w) / w.sum()).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        reference.step()
        reference.zero_grad()
    for a, b in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    assert all(p.grad is None for p in net.parameters())


@BOTH
@pytest.mark.parametrize("poison", ["gradient", "loss"])
def test_a_fault_freezes_weights_and_state_and_is_remembered(poison: str, optimizer: str):
    net = model()
    up = updater(net, optimizer=optimizer, weight_decay=0.1)
    x, w = torch.randn(6, 4), torch.ones(6)
    step(net, up, 0, weighted_losses(net, x, w), w.sum())
    before = snapshot(net, up)
    loss = weighted_losses(net, x, w)
    loss.backward()
    if poison == "gradient":
        net[0].weight.grad[0, 0] = float("inf")
    else:
        loss = loss * float("nan")
    up.apply(step=1, factor=1.0, loss_sum=loss, weight_sum=w.sum())
    step(net, up, 2, weighted_losses(net, x, w), w.sum())  # a healthy step after it must not move anything either
    for name, value in snapshot(net, up).items():
        assert torch.equal(value, before[name]), name
    fault = up.fault()
    assert fault is not None
    assert fault.step == 1
    assert updater(model()).fault() is None


@BOTH
def test_an_empty_step_changes_nothing_and_the_next_one_works(optimizer: str):
    net = model()
    up = updater(net, optimizer=optimizer, weight_decay=0.1)
    x, w = torch.randn(6, 4), torch.ones(6)
    step(net, up, 0, weighted_losses(net, x, w), w.sum())
    before = snapshot(net, up)
    norm = step(net, up, 1, weighted_losses(net, x, w * 0), (w * 0).sum())
    assert norm == 0
    assert up.fault() is None
    assert all(torch.equal(v, before[k]) for k, v in snapshot(net, up).items())
    up.apply(step=2, factor=1.0, loss_sum=torch.zeros(()), weight_sum=torch.zeros(()))  # no backward ran at all
    step(net, up, 3, weighted_losses(net, x, w), w.sum())
    assert not torch.equal(net[0].weight, before["0.weight"])


class Asked(TorchDispatchMode):
    """Counts the questions to the device that a host has to wait for."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        return function(*args, **(kwargs or {}))


@BOTH
def test_an_update_asks_the_device_nothing(optimizer: str):
    net = model()
    up = updater(net, optimizer=optimizer, weight_decay=0.1)
    loss = weighted_losses(net, torch.randn(6, 4), torch.ones(6))
    with Asked() as asked:
        step(net, up, 0, loss, torch.tensor(6.0))
        assert asked.count == 0
        assert torch.isfinite(loss)  # such a question is counted
    assert asked.count == 1


@BOTH
def test_the_schedule_moves_every_learning_rate(optimizer: str):
    net = model()
    up = updater(net, optimizer=optimizer, muon_learning_rate=0.5)
    for factor in (0.5, 0.25, 1.0):
        weighted_losses(net, torch.randn(6, 4), torch.ones(6)).backward()
        up.apply(step=0, factor=factor, loss_sum=torch.ones(()), weight_sum=torch.ones(()))
        peaks = [0.5, 0.01] if optimizer == "muon" else [0.01, 0.01]
        assert [group["lr"] for group in up.optimizer.param_groups] == [peak * factor for peak in peaks]


@BOTH
def test_optimizer_state_round_trip_is_exact_and_float32(optimizer: str):
    net = model()
    up = updater(net, optimizer=optimizer)
    x, w = torch.randn(6, 4), torch.ones(6)
    for number in range(3):
        step(net, up, number, weighted_losses(net, x, w), w.sum())
    saved = {k: v.clone() for k, v in optimizer_tensors(net, up.optimizer).items()}
    other = model(1)
    other.load_state_dict(net.state_dict())
    up2 = updater(other, optimizer=optimizer)
    restore_optimizer(other, up2.optimizer, saved)
    assert_full_precision(other, up2.optimizer)
    for n, u in ((net, up), (other, up2)):
        step(n, u, 3, weighted_losses(n, x, w), w.sum())
    left, right = snapshot(net, up), snapshot(other, up2)
    assert all(torch.equal(left[k], right[k]) for k in left)


@pytest.mark.parametrize(("optimizer", "name"), [("adamw", "exp_avg"), ("muon", r"momentum_buffer\.0\.weight")])
def test_state_that_came_back_in_bfloat16_is_refused(optimizer: str, name: str):
    net = model()
    up = updater(net, optimizer=optimizer)
    step(net, up, 0, weighted_losses(net, torch.randn(2, 4), torch.ones(2)), torch.tensor(2.0))
    saved = {k: v.bfloat16() for k, v in optimizer_tensors(net, up.optimizer).items()}
    restore_optimizer(net, up.optimizer, saved)
    with pytest.raises(TrainingError, match=rf"optimizer state {name}.* is torch.bfloat16"):
        assert_full_precision(net, up.optimizer)


def test_foreign_optimizer_state_is_refused():
    net = model()
    up = updater(net)
    step(net, up, 0, weighted_losses(net, torch.randn(2, 4), torch.ones(2)), torch.tensor(2.0))
    saved = optimizer_tensors(net, up.optimizer)
    missing = {k: v for k, v in saved.items() if k != "exp_avg.0.weight"}
    with pytest.raises(CheckpointError, match=r"disagree about exp_avg\.0\.weight"):
        restore_optimizer(net, up.optimizer, missing)
    with pytest.raises(CheckpointError, match="not"):
        restore_optimizer(net, up.optimizer, {**saved, "exp_avg.0.weight": torch.zeros(3)})


def test_the_state_of_the_other_optimizer_is_refused():
    nets = {name: model() for name in ("adamw", "muon")}
    ups = {name: updater(net, optimizer=name) for name, net in nets.items()}
    for name, net in nets.items():
        step(net, ups[name], 0, weighted_losses(net, torch.randn(2, 4), torch.ones(2)), torch.tensor(2.0))
    saved = {name: optimizer_tensors(net, ups[name].optimizer) for name, net in nets.items()}
    for name, other in (("adamw", "muon"), ("muon", "adamw")):
        with pytest.raises(CheckpointError, match=r"disagree about exp_avg\.0\.weight"):
            restore_optimizer(nets[name], ups[name].optimizer, saved[other])


@BOTH
def test_the_bytes_of_the_state_are_those_that_it_has(optimizer: str):
    net = model()
    up = updater(net, optimizer=optimizer)
    step(net, up, 0, weighted_losses(net, torch.randn(2, 4), torch.ones(2)), torch.tensor(2.0))
    held = sum(v.nbytes for k, v in optimizer_tensors(net, up.optimizer).items() if not k.startswith("step."))
    assert state_bytes([p.shape for p in net.parameters()], TrainingConfig(optimizer=optimizer)) == held
