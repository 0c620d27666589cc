"""Muon: its values are torch's, equal shapes share kernels, and a skipped update leaves no trace."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from slipstream.config import TrainingConfig
from slipstream.drafter.model import DraftModel
from slipstream.training import muon
from slipstream.training.hardware import resolve_precision
from slipstream.training.muon import MuonAdamW, batches, orthogonalisation_flops, orthogonalise
from slipstream.training.optimizer import build_optimizer
from support.drafting import normal, tiny_drafter_config

SHAPES = ((12, 8), (8, 12), (16, 16), (12, 8), (6, 40), (8, 12), (12, 8))


def parameters(seed: int = 0) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    matrices = [nn.Parameter(normal(*shape, seed=seed + n)) for n, shape in enumerate(SHAPES)]
    return matrices, [nn.Parameter(normal(8, seed=seed + 90)), nn.Parameter(normal(5, seed=seed + 91))]


def ours(matrices: list[nn.Parameter], others: list[nn.Parameter], **changes: object) -> MuonAdamW:
    settings = {"muon_learning_rate": 0.02, "momentum": 0.9, "weight_decay": 0.3, "learning_rate": 0.01}
    fixed = {"betas": (0.9, 0.95), "precision": torch.float32}
    return MuonAdamW(matrices, others, **{**settings, **fixed, **changes})  # type: ignore[arg-type]


def give_gradients(parameters: list[nn.Parameter], seed: int) -> None:
    for n, parameter in enumerate(parameters):
        parameter.grad = normal(*parameter.shape, seed=1000 * seed + n, scale=10.0 ** (n - 4))


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_values_are_those_of_torch_over_several_steps(precision: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    matrices, others = parameters()
    reference, rest = parameters()
    optimizer = ours(matrices, others, precision=precision)
    theirs = [
        torch.optim.Muon(reference, lr=0.02, momentum=0.9, weight_decay=0.3, adjust_lr_fn="original"),
        torch.optim.AdamW(rest, lr=0.01, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    for number in range(6):
        rate = 0.02 / (1 + number)
        optimizer.param_groups[0]["lr"] = theirs[0].param_groups[0]["lr"] = rate
        give_gradients([*matrices, *others], number)
        give_gradients([*reference, *rest], number)
        optimizer.step()
        with monkeypatch.context() as patch:
            if precision == torch.float32:  # torch's own goes through bfloat16 always
                patch.setattr(torch.Tensor, "bfloat16", lambda self: self.clone())
            for one in theirs:
                one.step()
    exact = {"rtol": 1e-5, "atol": 1e-5}
    for mine, its in zip(matrices, reference, strict=True):
        torch.testing.assert_close(
            optimizer.state[mine]["momentum_buffer"], theirs[0].state[its]["momentum_buffer"], rtol=1e-5, atol=1e-9
        )
        # In bfloat16 a product's sums may be rounded in another order: some steps' worth of 1 in 256 of 0.02.
        torch.testing.assert_close(mine, its, **exact if precision == torch.float32 else {"rtol": 0.0, "atol": 2e-3})
        assert float((mine - its).detach().norm() / its.detach().norm()) < 2e-3
    for mine, its in zip(others, rest, strict=True):
        torch.testing.assert_close(mine, its, **exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(24, 24), (40, 12), (12, 40), (1, 9)])
def test_orthogonalised_singular_values_are_near_one_and_zero_stays_zero(dtype: torch.dtype, shape: tuple[int, int]):
    matrices = torch.stack([normal(*shape, seed=n, scale=10.0**n) for n in (-6, 0, 6)])
    matrices[1] += 3 * torch.eye(*shape)  # no singular value near 0
    out = orthogonalise(torch.cat((matrices, torch.zeros(1, *shape))).to(dtype))
    assert out.dtype == dtype
    assert out.shape == (4, *shape)
    assert bool(out.isfinite().all())
    values = torch.linalg.svdvals(out[1].float())
    assert 0.6 < float(values.min()) <= float(values.max()) < 1.25
    assert not out[3].any()
    polar = torch.linalg.svd(matrices[1], full_matrices=False)
    torch.testing.assert_close(out[1].float(), polar.U @ polar.Vh, rtol=0, atol=0.35)


def test_batches_are_of_one_shape_and_bounded():
    matrices, _ = parameters()
    whole = batches(matrices)
    assert [[tuple(p.shape) for p in batch] for batch in whole] == [
        [(12, 8)] * 3,
        [(8, 12)] * 2,
        [(16, 16)],
        [(6, 40)],
    ]
    small = batches(matrices, elements=200)
    assert [len(batch) for batch in small] == [2, 1, 2, 1, 1]
    assert {id(p) for batch in small for p in batch} == {id(p) for p in matrices}


def test_results_do_not_depend_on_the_batches(monkeypatch: pytest.MonkeyPatch):
    runs = []
    for elements in (1, 200, 10**9):
        monkeypatch.setattr(muon, "batches", lambda found, most=elements: batches(found, most))
        matrices, others = parameters()
        optimizer = ours(matrices, others)
        for number in range(2):
            give_gradients([*matrices, *others], number)
            optimizer.step()
        runs.append(matrices)
    for other in runs[1:]:
        for a, b in zip(runs[0], other, strict=True):
            torch.testing.assert_close(a, b)


def test_the_operations_are_counted_as_they_are_made():
    shapes = [(12, 8), (8, 12), (16, 16), (5,)]
    with FlopCounterMode(display=False) as counter:
        for shape in shapes[:3]:
            orthogonalise(torch.ones(1, *shape))
    assert orthogonalisation_flops(shapes) == counter.get_total_flops()


class Products(TorchDispatchMode):
    """Counts batched products."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function in (torch.ops.aten.bmm.default, torch.ops.aten.baddbmm.default)
        return function(*args, **(kwargs or {}))


def test_matrices_of_one_shape_share_products():
    counts = []
    for number in (1, 30):
        optimizer = ours([nn.Parameter(normal(6, 4, seed=n)) for n in range(number)], [nn.Parameter(torch.ones(3))])
        give_gradients(optimizer.param_groups[0]["params"], 0)
        with Products() as products:
            optimizer.step()
        counts.append(products.count)
    assert counts == [3 * muon.ITERATIONS] * 2


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1.0])
def test_a_skipped_update_changes_no_bit(bad: float):
    matrices, others = parameters()
    optimizer = ours(matrices, others)
    with torch.no_grad():
        matrices[0][0, 0] = -0.0
    give_gradients([*matrices, *others], 0)
    optimizer.found_inf = torch.ones(())
    optimizer.step()  # the very first one: there is no state yet
    assert not any(optimizer.state[p]["momentum_buffer"].any() for p in matrices)
    optimizer.found_inf = torch.zeros(())
    optimizer.step()
    held = [*matrices, *others, *(v for p in [*matrices, *others] for v in optimizer.state[p].values())]
    before = [t.detach().clone() for t in held]
    give_gradients([*matrices, *others], 1)
    for parameter in [*matrices, *others]:
        parameter.grad.view(-1)[0] *= bad  # type: ignore[union-attr]
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    for old, new in zip(before, held, strict=True):
        assert torch.equal(old.view(torch.int32), new.detach().view(torch.int32))


def test_muon_has_every_matrix_of_a_drafter_and_adamw_every_norm():
    draft_model = DraftModel(tiny_drafter_config())
    optimizer = build_optimizer(draft_model, TrainingConfig(optimizer="muon", weight_decay=0.1, muon_momentum=0.8))
    first, *rest = optimizer.param_groups
    names = {id(p): name for name, p in draft_model.named_parameters()}
    mine = {names[id(p)] for p in first["params"]}
    assert mine == {name for name, p in draft_model.named_parameters() if p.dim() == 2}
    assert "fc.weight" in mine
    assert (first["lr"], first["momentum"], first["weight_decay"]) == (0.02, 0.8, 0.1)
    assert {names[id(p)] for group in rest for p in group["params"]} == set(names.values()) - mine
    assert {(group["lr"], group["weight_decay"]) for group in rest} == {(6e-4, 0.0)}


@pytest.mark.parametrize("name", ["auto", "bfloat16", "float32"])
def test_the_products_are_made_in_the_drafters_precision(name: str, monkeypatch: pytest.MonkeyPatch):
    seen: list[torch.dtype] = []
    plain = muon.orthogonalise
    monkeypatch.setattr(muon, "orthogonalise", lambda x: seen.append(x.dtype) or plain(x))
    net = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    optimizer = build_optimizer(net, TrainingConfig(optimizer="muon", precision=name))
    net(torch.ones(2, 8)).square().sum().backward()
    optimizer.step()
    assert set(seen) == {resolve_precision(name, torch.device("cpu"))}
    assert {p.dtype for p in net.parameters()} == {torch.float32}


def test_a_parameter_without_gradient_is_left_alone():
    matrices, others = parameters()
    optimizer = ours(matrices, others)
    give_gradients(matrices[1:], 0)
    before = matrices[0].detach().clone()
    optimizer.step()
    assert torch.equal(matrices[0], before)
    assert not optimizer.state[matrices[0]]


def test_more_rows_than_columns_take_larger_steps():
    tall, wide = nn.Parameter(torch.zeros(64, 4)), nn.Parameter(torch.zeros(4, 64))
    optimizer = ours([tall, wide], [nn.Parameter(torch.ones(3))], weight_decay=0.0)
    tall.grad = normal(64, 4)
    wide.grad = tall.grad.T.clone()
    optimizer.step()
    torch.testing.assert_close(tall.detach(), 4 * wide.detach().T)  # sqrt(64 / 4)
