"""Linear layers laid out for decoding multiply as they did, and are themselves again afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from slipstream.decoding import packed
from slipstream.decoding.packed import LEAST_WEIGHTS, pack, packed_linears

WIDE = 256


def model(bias: bool = True) -> nn.Sequential:
    """Two layers that are large enough, and one that is not."""
    torch.manual_seed(0)
    assert WIDE * WIDE >= LEAST_WEIGHTS > 8 * WIDE
    return nn.Sequential(nn.Linear(WIDE, WIDE, bias=bias), nn.Linear(WIDE, 8), nn.Linear(8, 8192, bias=False))


def replaced(net: nn.Module) -> list[bool]:
    return ["forward" in layer.__dict__ for layer in net]  # type: ignore[attr-defined]


@pytest.mark.parametrize("bias", [True, False])
def test_the_product_is_the_layers_own_for_any_shape(bias: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(300, WIDE, generator=generator)
    added = torch.randn(300, generator=generator) if bias else None
    multiply = pack(weight, added)
    x = torch.randn(6, 5, WIDE, generator=generator)
    with torch.inference_mode():
        for given in (
            x,
            x[:1, :1],
            x[:, -1],
            x.transpose(0, 1),
            x[:, ::2],
            x[0, 0],
            x.reshape(-1, WIDE),
            x.repeat(40, 1, 1),
        ):
            torch.testing.assert_close(multiply(given), F.linear(given, weight, added), atol=1e-4, rtol=1e-5)


def test_layers_are_replaced_inside_and_themselves_outside() -> None:
    net = model()
    x = torch.randn(3, WIDE)
    with torch.inference_mode():
        before = net(x)
        with packed_linears(net, None) as reason:
            assert reason == ""
            assert replaced(net) == [True, False, True]
            torch.testing.assert_close(net(x), before, atol=1e-5, rtol=1e-5)
            with packed_linears(net):  # what is in place stays in place
                assert replaced(net) == [True, False, True]
            assert replaced(net) == [True, False, True]
    assert replaced(net) == [False] * 3
    with pytest.raises(KeyError), packed_linears(net):
        raise KeyError
    assert replaced(net) == [False] * 3


def test_other_inputs_take_the_layers_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(_weight: torch.Tensor, _bias: torch.Tensor | None = None) -> packed.Forward:
        def product(_: torch.Tensor) -> torch.Tensor:
            raise AssertionError("the rearranged weight was used")

        return product

    monkeypatch.setattr(packed, "pack", never)
    net = model()
    with packed_linears(net):
        assert net(torch.randn(2, WIDE)).requires_grad
        with torch.no_grad():
            assert net(torch.randn(0, WIDE)).shape == (0, 8192)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                net(torch.randn(2, WIDE))
            with pytest.raises(AssertionError, match="was used"):
                net(torch.randn(2, WIDE))


def test_models_of_other_dtypes_are_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    net = model().bfloat16()
    with packed_linears(net) as reason:
        assert (reason, replaced(net)) == ("", [False] * 3)
    assert capsys.readouterr().err == ""


def test_a_product_that_is_another_one_is_found_out_and_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = F.linear
    monkeypatch.setattr(packed.F, "linear", lambda x, w, b=None: 1.01 * right(x, w, b))
    net = model()
    with packed_linears(net) as reason:
        assert "differs from the layer's own by 0.0099" in reason
        assert replaced(net) == [False] * 3
    assert f"linear layers are not laid out for decoding: {reason}\n" == capsys.readouterr().err


def test_layers_before_one_that_cannot_be_rearranged_stay_right(monkeypatch: pytest.MonkeyPatch) -> None:
    def second(weight: torch.Tensor, bias: torch.Tensor | None = None) -> packed.Forward:
        if bias is None:
            raise RuntimeError("no such kernel\nand a trace")
        return pack(weight, bias)

    monkeypatch.setattr(packed, "pack", second)
    net = model()
    x = torch.randn(3, WIDE)
    with torch.inference_mode(), packed_linears(net) as reason:
        assert reason == "no such kernel"
        torch.testing.assert_close(net[0](x), F.linear(x, net[0].weight, net[0].bias), atol=1e-5, rtol=1e-5)
    assert replaced(net) == [False] * 3


def test_memory_is_not_filled_with_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    net = model()
    monkeypatch.setattr(packed, "_free_bytes", lambda: 2**10)
    with packed_linears(net) as reason:
        assert "free memory" in reason
        assert replaced(net) == [False] * 3
    monkeypatch.setattr(packed, "_free_bytes", lambda: None)
    with packed_linears(net) as reason:
        assert reason == ""


def test_free_memory_is_read_where_the_machine_tells() -> None:
    found = packed._free_bytes()
    assert (found is not None and found > 2**20) if Path("/proc/meminfo").exists() else found is None
