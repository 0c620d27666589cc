"""Recurrent layers in packed rows. FLA itself runs on GPUs only: here a rule that honours bounds stands in for it."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from slipstream.errors import TargetError
from slipstream.records import PackedBatch
from slipstream.target import recurrent
from slipstream.target.families import recurrent_modules, text_config
from slipstream.target.features import FeatureReader
from slipstream.target.layout import Arrangement, a_row_each, document_layout, one_row
from slipstream.target.model import Target
from slipstream.target.recurrent import DocumentsApart, arrangements
from support.tiny import save_tiny_target, tiny_tokenizer
from unit.target.conftest import CPU, documents_of, load_in, packed_batch

IDS = (0, 1, 2, 3, 6)
RULE = "transformers.models.qwen3_5.modeling_qwen3_5.torch_chunk_gated_delta_rule"
# The tiny targets' convolution sees four tokens, the delta rule calculates 64 at a time.
LAYOUTS: dict[str, tuple[tuple[tuple[int, ...], ...], int]] = {
    "shorter than the convolution": (((1, 2, 3, 1, 1, 2, 3, 3, 2, 1, 4), (1,) * 20), 24),
    "full rows": (((30, 34), (1, 63), (60, 4)), 64),
    "padding at the end": (((30, 20), (5,)), 70),
    "a document a row": (((50,), (64,), (1,), (20,)), 64),
    "one row": (((7, 66, 1, 22),), 96),
    "many rows": (tuple((length, 17, 40 - length) for length in range(1, 25)), 60),
    "chunks of the rule": (((64, 65, 63, 128),), 320),
    "one document of all tokens": (((40,),), 40),
    "a row of padding": (((9, 8), (), (20,)), 20),
    "one token": (((1,),), 1),
}


def with_bounds(genuine: Any, calls: list[dict[str, Any]]) -> Any:
    """Return a rule as FLA's: one row, the state set back at ``cu_seqlens``."""

    def rule(*args: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor | None = None, **rest: Any) -> Any:
        calls.append({"cu_seqlens": cu_seqlens, "shape": args[0].shape, **rest})
        if cu_seqlens is None:
            return genuine(*args, g=g, beta=beta, **rest)
        assert args[0].shape[0] == 1
        parts = [
            genuine(*(a[:, start:end] for a in args), g=g[:, start:end], beta=beta[:, start:end], **rest)[0]
            for start, end in pairwise(cu_seqlens.tolist())
        ]
        return torch.cat(parts, dim=1), None

    return rule


@pytest.fixture(scope="session")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """A hybrid target that does not enlarge rounding as the others' larger weights do: the bounds here are narrow."""
    return load_in(save_tiny_target(tmp_path_factory.mktemp("calm") / "target", "qwen3_5", scale=1.0))


@pytest.fixture
def rule() -> Any:
    from transformers.models.qwen3_5 import modeling_qwen3_5

    return modeling_qwen3_5.torch_chunk_gated_delta_rule


@pytest.fixture
def bounds_honoured(monkeypatch: pytest.MonkeyPatch, rule: Any) -> list[dict[str, Any]]:
    """Let the delta rule honour bounds; return its calls."""
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(RULE, with_bounds(rule, calls))
    return calls


def alone(target: Target, batch: PackedBatch) -> Tensor:
    """The reference: the features of each document, with nothing beside it."""
    reader = FeatureReader(target, IDS, "unpacked")
    out = torch.zeros(*batch.ids.shape, len(IDS) * target.info.hidden_size)
    with torch.no_grad():
        for row, place in documents_of(batch):
            out[row, place] = reader._forward(batch.ids[row : row + 1, place])[0]
    return out


def apart(read: Tensor, expected: Tensor) -> float:
    """Return the largest relative difference of a token and tap; padding must be zero in both."""
    read, expected = (t.unflatten(-1, (len(IDS), -1)) for t in (read, expected))
    size = expected.norm(dim=-1)
    assert torch.equal(read.norm(dim=-1) == 0, size == 0)
    return float(((read - expected).norm(dim=-1) / size.clamp_min(1e-12)).max())


def hooks_of(target: Target) -> list[int]:
    modules = recurrent_modules(target.parts, target.model.config)
    return [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in modules]


@pytest.mark.parametrize("name", LAYOUTS)
def test_documents_are_read_as_alone_by_any_kernel(calm, name):
    reader = FeatureReader(calm, IDS, "packed")
    assert (reader.mode, reader.recurrent) == ("packed", "documents")
    assert reader.packing == "packed, recurrent layers by documents"
    assert reader.probe_difference < 1e-5
    batch = packed_batch(*LAYOUTS[name])
    assert apart(reader.read(batch).features, alone(calm, batch)) < 1e-5


@pytest.mark.parametrize("name", LAYOUTS)
def test_documents_are_read_as_alone_where_the_rule_honours_bounds(calm, bounds_honoured, name):
    reader = FeatureReader(calm, IDS, "packed")
    assert (reader.mode, reader.recurrent, reader.reason) == ("packed", "cu_seqlens", "")
    assert reader.probe_difference < 1e-5
    batch = packed_batch(*LAYOUTS[name])
    expected = alone(calm, batch)
    bounds_honoured.clear()
    assert apart(reader.read(batch).features, expected) < 1e-5


def test_a_rule_gets_the_same_bounds_in_every_layer(target_of, bounds_honoured):
    """FLA derives its chunks once from a pair of tensors that it knows again, and from the one on the CPU."""
    reader = FeatureReader(target_of("qwen3_5"), IDS, "packed")
    bounds_honoured.clear()
    reader.read(packed_batch())
    assert len(bounds_honoured) == 6  # of seven layers up to the last tap
    first = bounds_honoured[0]
    assert all(call["cu_seqlens"] is first["cu_seqlens"] for call in bounds_honoured)
    assert all(call["cu_seqlens_cpu"] is first["cu_seqlens_cpu"] for call in bounds_honoured)
    assert first["cu_seqlens"].dtype == torch.int64
    assert torch.equal(first["cu_seqlens"], first["cu_seqlens_cpu"])
    assert first["cu_seqlens"][-1] == first["shape"][1]


@pytest.mark.parametrize("fault", ["ignores", "raises"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rule_without_bounds_is_found_out(directory_of, monkeypatch, rule, fault, dtype, capsys):
    """transformers 5.16 and 5.17 leave bounds out where a rule has none, 5.24 raises."""

    def without(*args: Tensor, cu_seqlens: Tensor | None = None, **rest: Any) -> Any:
        if cu_seqlens is not None and fault == "raises":
            raise ValueError("can't keep packed sequences apart")
        return rule(*args, **rest)

    monkeypatch.setattr(RULE, without)
    reader = FeatureReader(load_in(directory_of("qwen3_5"), dtype), IDS)
    assert (reader.mode, reader.recurrent) == ("packed", "documents")
    told = "documents leak" if fault == "ignores" else "it refuses packed rows: can't keep packed sequences apart"
    assert reader.reason.startswith(f"with recurrent layers by cu_seqlens, {told}")
    assert capsys.readouterr().err == ""


def test_bounds_that_are_ignored_are_found_out_where_states_fade_at_once(directory_of, monkeypatch, rule):
    """What leaks is then too little to be seen, here; but not in every layer of every model, nor in long documents."""
    target = load_in(directory_of("qwen3_5"))
    for module in recurrent_modules(target.parts, target.model.config):
        module.A_log.fill_(5.0)
    monkeypatch.setattr(RULE, lambda *args, cu_seqlens=None, **rest: rule(*args, **rest))
    reader = FeatureReader(target, IDS)
    assert (reader.mode, reader.recurrent) == ("packed", "documents")
    assert reader.reason == "with recurrent layers by cu_seqlens, its kernels ignore the bounds of documents"


def joined(layout: Any) -> Any:
    """Two neighbours in a row become one document."""
    first, second, *rest = layout.documents
    return dataclasses.replace(layout, documents=(dataclasses.replace(first, end=second.end), *rest))


def moved(found: Arrangement) -> Arrangement:
    """Every token comes back one place too far."""
    return dataclasses.replace(found, inside=(found.inside - 1).clamp_min(0))


FAULTS: dict[str, dict[str, Callable[..., Any]]] = {
    "two documents are one": {
        "a_row_each": lambda layout: a_row_each(joined(layout)),
        "one_row": lambda layout, gap: one_row(joined(layout), gap),
    },
    "no zeros before a document": {
        "a_row_each": lambda layout: (dataclasses.replace(one_row(layout, 0), bounds=None),),
        "one_row": lambda layout, gap: one_row(layout, 0),
    },
    "a zero too few": {
        "a_row_each": lambda layout: (dataclasses.replace(one_row(layout, 9), bounds=None),),
        "one_row": lambda layout, gap: one_row(layout, gap - 1),
    },
    "tokens change places": {
        "a_row_each": lambda layout: tuple(map(moved, a_row_each(layout))),
        "one_row": lambda layout, gap: moved(one_row(layout, gap)),
    },
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_probe_finds_out_a_wrong_arrangement(directory_of, monkeypatch, bounds_honoured, fault, dtype, capsys):
    target = load_in(directory_of("qwen3_5"), dtype)
    for name, function in FAULTS[fault].items():
        monkeypatch.setattr(recurrent, name, function)
    reader = FeatureReader(target, IDS)
    assert (reader.mode, reader.recurrent, reader.packing) == ("unpacked", None, "unpacked")
    assert "by documents, documents leak" in reader.reason
    assert f"documents are read unpacked, because {reader.reason}" in capsys.readouterr().err
    with pytest.raises(TargetError, match="cannot be packed: with recurrent layers by documents, documents leak"):
        FeatureReader(target, IDS, "packed")
    batch = packed_batch()
    if dtype == torch.float32:
        assert apart(reader.read(batch).features, alone(target, batch)) < 1e-4


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("honoured", [False, True])
def test_attention_keeps_documents_apart_by_their_positions(directory_of, request, attention, honoured):
    if honoured:
        request.getfixturevalue("bounds_honoured")
    target = load_in(directory_of("qwen3_5"), attention=attention)
    reader = FeatureReader(target, IDS, "packed")
    assert reader.recurrent == ("cu_seqlens" if honoured else "documents")
    batch = packed_batch()
    assert apart(reader.read(batch).features, alone(target, batch)) < 1e-4


def test_attention_that_crosses_documents_is_found_out(directory_of, monkeypatch, capsys):
    """Recurrent layers apart do not hide what the others do."""
    target = load_in(directory_of("qwen3_5"))
    forward = target.parts.decoder.forward
    whole = lambda ids: torch.ones(len(ids), 1, ids.shape[1], ids.shape[1], dtype=torch.bool).tril()  # noqa: E731

    def broken(input_ids=None, position_ids=None, **rest):
        mask = {"full_attention": whole(input_ids), "linear_attention": None}
        return forward(input_ids=input_ids, position_ids=position_ids, attention_mask=mask, **rest)

    monkeypatch.setattr(target.parts.decoder, "forward", broken)
    assert FeatureReader(target, IDS).mode == "unpacked"
    assert "documents leak" in capsys.readouterr().err


@pytest.mark.parametrize("honoured", [False, True])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_inside_the_multimodal_class(multimodal, request, honoured, attention):
    if honoured:
        request.getfixturevalue("bounds_honoured")
    model, _ = multimodal
    before = model.config._attn_implementation
    target = Target(model, tiny_tokenizer(), name="whole", digest="")
    try:
        model.set_attn_implementation(attention)
        assert text_config(model.config)._attn_implementation == attention
        reader = FeatureReader(target, IDS, "packed")
        assert reader.recurrent == ("cu_seqlens" if honoured else "documents")
        batch = packed_batch()
        assert apart(reader.read(batch).features, alone(target, batch)) < 1e-4
    finally:
        model.set_attn_implementation(before)


def test_rows_that_hold_one_document_are_left_as_they_are(target_of):
    info = target_of("llama").info
    layout = document_layout(packed_batch(((9,), (), (20,)), 20), info)
    assert arrangements("documents", layout, ()) == ()
    assert arrangements("cu_seqlens", layout, ())[0].shape == (1, 32)  # one kernel for all batches
    assert arrangements("cu_seqlens", document_layout(packed_batch(((), ()), 12), info), ()) == ()


def test_a_batch_of_padding_only(target_of):
    reader = FeatureReader(target_of("qwen3_5"), IDS, "packed")
    assert not reader.read(packed_batch(((), ()), 12)).features.any()


def test_other_families_have_no_recurrent_modules(target_of):
    assert recurrent_modules(target_of("qwen3").parts, target_of("qwen3").model.config) == ()
    reader = FeatureReader(target_of("qwen3"), IDS)
    assert (reader.recurrent, reader.packing) == (None, "packed")


def test_nothing_is_left_on_the_modules(target_of, monkeypatch):
    target = target_of("qwen3_5")
    before = hooks_of(target)
    reader = FeatureReader(target, IDS, "packed")
    reader.read(packed_batch())
    assert hooks_of(target) == before
    monkeypatch.setattr(target.parts.layers[2].linear_attn, "forward", lambda *a, **k: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        reader.read(packed_batch())
    assert hooks_of(target) == before
    monkeypatch.undo()
    batch = packed_batch()
    assert apart(reader.read(batch).features, alone(target, batch)) < 1e-4


class Sum(nn.Module):
    """A state that is the sum so far: the simplest recurrent module."""

    calls = 0

    def forward(self, states: Tensor, scale: float = 1.0, *, more: Any = None, fail: bool = False) -> Any:
        self.calls += 1
        if fail and self.calls > 1:
            raise ZeroDivisionError
        states = states if more is None else states + more
        return scale * states.cumsum(1), "kept"


def sums(batch: PackedBatch, states: Tensor) -> Tensor:
    out = torch.zeros_like(states)
    for row, place in documents_of(batch):
        out[row, place] = states[row, place].cumsum(0)
    return out


@pytest.fixture
def toy(target_of) -> tuple[Sum, PackedBatch, Tensor, DocumentsApart]:
    batch, module = packed_batch(), Sum()
    layout = document_layout(batch, target_of("llama").info)
    context = DocumentsApart((module,), arrangements("documents", layout, (module,)), batch.ids.shape, CPU)
    return module, batch, torch.randn(*batch.ids.shape, 5), context


def test_arguments_of_tokens_are_arranged_and_others_left_alone(toy):
    module, batch, states, context = toy
    with context:
        found, kept = module(states, 2.0, more=states)
        again, _ = module(states)
    torch.testing.assert_close(found, sums(batch, 4 * states))
    torch.testing.assert_close(again, sums(batch, states))
    assert kept == "kept"
    torch.testing.assert_close(module(states)[0], states.cumsum(1))


def test_another_threads_forward_is_left_alone(toy):
    module, batch, states, context = toy
    found: list[Tensor] = []
    with context:
        thread = threading.Thread(target=lambda: found.append(module(states)[0]))
        thread.start()
        thread.join()
        mine, _ = module(states)
    torch.testing.assert_close(found[0], states.cumsum(1))
    torch.testing.assert_close(mine, sums(batch, states))


def test_two_threads_at_once_each_with_its_own_documents(target_of):
    """Both contexts are on the same module: each sees the calls of its own thread, whichever leaves first."""
    module, info = Sum(), target_of("llama").info
    batches = [packed_batch(((3, 30, 1, 40), (70, 20, 4))), packed_batch(((40, 50), (2, 2)))]
    states = torch.randn(2, 96, 5)
    both, found = threading.Barrier(2, timeout=10), {}

    def work(number: int) -> None:
        layout = document_layout(batches[number], info)
        arranged = arrangements("documents", layout, (module,))
        with DocumentsApart((module,), arranged, states.shape[:2], CPU):
            both.wait()
            found[number] = [module(states)[0] for _ in range(20)]

    threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, batch in enumerate(batches):
        for result in found[number]:
            torch.testing.assert_close(result, sums(batch, states))
    assert not module._forward_hooks
    assert not module._forward_pre_hooks


def test_a_context_that_ends_while_another_thread_calls_the_module_does_not_disturb_that_call(toy):
    """torch takes the list of hooks first and asks later which want keywords: a hook removed in between gets none."""
    module, _, states, context = toy
    expected, found = module(states)[0], []
    ending = module.register_forward_pre_hook(lambda *_: context.__exit__(None, None, None))
    with context:
        thread = threading.Thread(target=lambda: found.append(module(states)[0]))
        thread.start()
        thread.join()
    ending.remove()
    assert len(found) == 1
    torch.testing.assert_close(found[0], expected)


def test_an_error_in_a_module_leaves_the_context_usable(toy):
    module, batch, states, context = toy
    with context:
        with pytest.raises(ZeroDivisionError):
            module(states, fail=True)  # in one of the calls that a hook makes
        module.calls = 0
        torch.testing.assert_close(module(states)[0], sums(batch, states))
    assert not module._forward_hooks
    assert not module._forward_pre_hooks


def test_modules_of_another_make_are_refused(toy):
    module, _, states, context = toy
    with context, pytest.raises(TargetError, match="Sum is not called with states of the batch's rows and tokens"):
        module(states[:, :5])
    module.forward = lambda states: states[:, :3]  # type: ignore[method-assign]
    with context, pytest.raises(TargetError, match="Sum does not return one state for each token"):
        module(states)


def test_how_far_convolutions_look_back(target_of):
    modules = recurrent_modules(target_of("qwen3_5").parts, target_of("qwen3_5").model.config)
    assert len(modules) == 6
    assert recurrent._look_back(modules) == 3
    assert recurrent._look_back((nn.Conv1d(4, 4, 3, dilation=5), nn.Linear(2, 2))) == 10
    assert recurrent._look_back((nn.Linear(2, 2),)) == 0
