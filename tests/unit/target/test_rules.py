"""Each call of a rule goes to the code that suits its tensors, and every target can be read on a CPU."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from slipstream.target.features import FeatureReader
from slipstream.target.rules import Rule, settle_rules
from support.kernels import CHUNKED, PACKAGE, RECURRENT, kernel_of, own_rule, refuse_cpu, take_kernels
from unit.target.conftest import load_in, packed_batch

IDS = (0, 1, 2, 3, 6)


@pytest.fixture
def gpu_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels as FLA's: they raise for tensors on a CPU."""
    take_kernels(monkeypatch, **{name: kernel_of(own_rule(name), refuse_cpu) for name in (CHUNKED, RECURRENT)})


def test_a_hybrid_target_is_read_on_a_cpu_where_its_kernels_cannot_run(
    directory_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, batch = directory_of("qwen3_5"), packed_batch()
    before = FeatureReader(load_in(directory), IDS).read(batch).features
    assert PACKAGE not in capsys.readouterr().err
    take_kernels(monkeypatch, **{name: kernel_of(own_rule(name), refuse_cpu) for name in (CHUNKED, RECURRENT)})
    target = load_in(directory)
    said = [line for line in capsys.readouterr().err.splitlines() if PACKAGE in line]
    assert len(said) == 1
    assert "on a CPU its recurrent layers run by transformers' own code" in said[0]
    reader = FeatureReader(target, IDS)
    assert reader.packing == "packed, recurrent layers by documents"
    assert "refuses packed rows: chunk_gated_delta_rule cannot keep packed sequences apart on a CPU" in reader.reason
    assert torch.equal(reader.read(batch).features, before)


@pytest.mark.usefixtures("gpu_kernels")
def test_a_cached_step_runs_on_a_cpu_too(directory_of: Callable[[str], Path]) -> None:
    model = load_in(directory_of("qwen3_5")).model
    ids = torch.arange(12)[None]
    with torch.no_grad():
        whole = model(ids).logits
        cache = model(ids[:, :-1], use_cache=True).past_key_values
        name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        last = model(ids[:, -1:], **{name: cache}, use_cache=True).logits
    torch.testing.assert_close(last, whole[:, -1:], atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("gpu_kernels")
def test_without_kernels_nothing_is_said_or_put_in_place(
    directory_of: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    target = load_in(directory_of("qwen3"))
    assert "on a CPU" not in capsys.readouterr().err
    assert settle_rules(target.model) == ""


@pytest.mark.usefixtures("gpu_kernels")
def test_a_rule_is_put_in_place_once_whoever_asks(directory_of: Callable[[str], Path]) -> None:
    import transformers.models.qwen3_5.modeling_qwen3_5 as home

    model = load_in(directory_of("qwen3_5")).model
    first = home.torch_chunk_gated_delta_rule
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(settle_rules(model))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [PACKAGE] * 4
    assert home.torch_chunk_gated_delta_rule is first
    assert isinstance(first, Rule)
    assert not isinstance(first.kernel, Rule)
    assert first.exact is home.torch_recurrent_gated_delta_rule.kernel


def rule(exact: bool = True) -> Rule:
    """Return a rule whose functions tell their names."""

    def own(query: Any, g: Any = None, output_final_state: bool = False) -> str:
        return "own"

    return Rule(lambda *_, **__: "kernel", own, "some", (lambda *_, **__: "exact") if exact else None)


GPU = torch.device("meta")  # as good as any that is no CPU: the functions compute nothing


@pytest.mark.parametrize(
    ("dtype", "device", "named", "to"),
    [
        (torch.float32, GPU, {"output_final_state": True}, "exact"),
        (torch.float32, GPU, {"output_final_state": True, "cu_seqlens": None}, "exact"),
        (torch.float32, GPU, {"output_final_state": True, "cu_seqlens": torch.zeros(2, device=GPU)}, "kernel"),
        (torch.float32, GPU, {"output_final_state": False}, "kernel"),
        (torch.float32, GPU, {}, "kernel"),
        (torch.bfloat16, GPU, {"output_final_state": True}, "kernel"),
        (torch.float32, torch.device("cpu"), {"output_final_state": True}, "own"),
        (torch.bfloat16, torch.device("cpu"), {"unknown": 1, "seq_idx": None}, "own"),
    ],
)
def test_where_a_call_goes(dtype: torch.dtype, device: torch.device, named: dict[str, Any], to: str) -> None:
    query = torch.zeros(1, 2, device=device, dtype=dtype)
    assert rule()(query, **named) == to
    assert rule()(query=query, **named) == to
    assert rule(exact=False)(query, **named) == to.replace("exact", "kernel")


def test_a_kernel_without_gradient_is_not_taken_for_training() -> None:
    query = torch.zeros(1, 2, device=GPU, requires_grad=True)
    assert rule()(query, output_final_state=True) == "kernel"


@pytest.mark.parametrize("name", ["cu_seqlens", "seq_idx"])
def test_bounds_of_documents_are_refused_on_a_cpu_rather_than_ignored(name: str) -> None:
    with pytest.raises(ValueError, match="own cannot keep packed sequences apart on a CPU"):
        rule()(torch.zeros(1, 2), **{name: torch.zeros(2)})


def test_a_module_without_source_or_rules_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    class Layer(torch.nn.Module):
        pass

    monkeypatch.setattr(Layer, "__module__", "no.such.module")
    assert settle_rules(Layer()) == ""
    home = ModuleType("home")
    home.layer = Layer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "no.such.module", home)
    assert settle_rules(Layer()) == ""
