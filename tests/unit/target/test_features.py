from __future__ import annotations

import contextlib
import dataclasses
import threading

import pytest
import torch

from slipstream.errors import TargetError
from slipstream.records import PackedBatch
from slipstream.target.features import FeatureReader, tap_layers, validate_layer_ids
from slipstream.target.model import Target
from support.tiny import FAMILIES, HIDDEN, tiny_tokenizer
from support.watching import calls_of
from unit.target.conftest import documents_of, load_in, packed_batch

IDS = (1, 2, 3, 4, 6)
PACKED = dict.fromkeys(FAMILIES, "packed") | {"qwen3_5": "packed, recurrent layers by documents"}


def hidden_states(target: Target, ids: torch.Tensor) -> torch.Tensor:
    """The reference: what Hugging Face returns for one document alone, at index i + 1."""
    with torch.no_grad():
        states = target.model(input_ids=ids[None], output_hidden_states=True, use_cache=False).hidden_states
    return torch.cat([states[i + 1][0] for i in IDS], dim=-1)


def check_against_reference(target: Target, reader: FeatureReader, batch: PackedBatch) -> None:
    result = reader.read(batch)
    assert result.features.shape == (*batch.ids.shape, len(IDS) * HIDDEN)
    assert result.features.dtype == target.dtype
    assert not result.features.requires_grad
    assert not result.features.is_inference()  # a drafter that trains on them saves them for its backward
    for row, place in documents_of(batch):
        expected = hidden_states(target, batch.ids[row, place])
        torch.testing.assert_close(result.features[row, place], expected, rtol=2e-4, atol=2e-4)
    assert torch.equal(
        result.features[batch.document_ids < 0], torch.zeros(1).expand_as(result.features[batch.document_ids < 0])
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("packing", ["auto", "unpacked"])
def test_features_equal_hidden_states_of_each_document_alone(target_of, family, packing):
    target = target_of(family)
    reader = FeatureReader(target, IDS, packing)
    check_against_reference(target, reader, packed_batch())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_auto_packs_where_it_is_exact(directory_of, family, dtype, capsys):
    reader = FeatureReader(load_in(directory_of(family), dtype), IDS)
    assert reader.packing == PACKED[family]
    assert capsys.readouterr().err == ""
    # A delta rule that keeps documents apart by itself exists for GPUs only.
    assert reader.reason == "" if family != "qwen3_5" else "cu_seqlens" in reader.reason
    if dtype == torch.float32:
        assert 0 <= reader.probe_difference < 1e-4


def test_recurrent_layers_that_are_not_found_run_on(target_of, monkeypatch, capsys):
    monkeypatch.setattr("slipstream.target.features.recurrent_modules", lambda *_: ())
    reader = FeatureReader(target_of("qwen3_5"), IDS)
    assert reader.packing == "unpacked"
    assert "documents are read unpacked, because its recurrent state runs on" in capsys.readouterr().err
    assert reader.probe_difference > 0.1
    check_against_reference(reader.target, reader, packed_batch())
    with pytest.raises(TargetError, match=r"cannot be packed: its recurrent state .* set target.packing to auto"):
        FeatureReader(target_of("qwen3_5"), IDS, "packed")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fault", ["mask", "positions", "first token"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_probe_sees_a_leak_and_wrong_positions(directory_of, monkeypatch, capsys, family, fault, dtype):
    """Break packing in an otherwise sound target; the probe has to notice."""
    target = load_in(directory_of(family), dtype)
    forward = target.parts.decoder.forward

    def broken(input_ids=None, position_ids=None, **rest):
        if position_ids is not None:
            tokens = torch.arange(input_ids.shape[1])
            causal = tokens[:, None] >= tokens[None, :]
            first = torch.nn.functional.pad(position_ids[:, 1:] != position_ids[:, :-1] + 1, (1, 0))
            document = first.cumsum(-1)
            if fault == "mask":  # one document from the model's point of view, with the right positions
                rest["attention_mask"] = causal.expand(len(input_ids), 1, -1, -1)
            elif fault == "positions":  # documents apart, but every step is two
                position_ids = position_ids * 2
                rest["attention_mask"] = ((document[:, :, None] == document[:, None, :]) & causal)[:, None]
            else:  # all see the first token of the row
                same = (document[:, :, None] == document[:, None, :]) & causal
                same[:, :, 0] = True
                rest["attention_mask"] = same[:, None]
        return forward(input_ids=input_ids, position_ids=position_ids, **rest)

    monkeypatch.setattr(target.parts.decoder, "forward", broken)
    reader = FeatureReader(target, IDS)
    assert reader.mode == "unpacked"
    assert "documents leak" in capsys.readouterr().err


def test_text_model_inside_the_multimodal_class(multimodal):
    model, directory = multimodal
    whole = Target(model, tiny_tokenizer(), name="whole", digest="")
    check_against_reference(whole, FeatureReader(whole, IDS), packed_batch())
    alone = load_in(directory)  # transformers reads the text model alone out of a multimodal checkpoint
    batch = packed_batch(seed=9)
    torch.testing.assert_close(
        FeatureReader(alone, IDS).read(batch).features,
        FeatureReader(whole, IDS).read(batch).features,
        rtol=1e-4,
        atol=1e-4,
    )


@pytest.mark.parametrize("packing", ["packed", "unpacked"])
def test_stops_after_the_last_tap_and_never_runs_the_head(target_of, packing):
    target = target_of("qwen3")
    reader = FeatureReader(target, (1, 3), packing)
    watched = {"head": target.parts.lm_head, "norm": target.parts.norm}
    watched |= {f"layer {i}": layer for i, layer in enumerate(target.parts.layers)}
    with calls_of(watched) as calls:
        reader.read(packed_batch())
    assert set(calls) == {"layer 0", "layer 1", "layer 2", "layer 3"}


def test_hooks_are_removed_after_a_read_and_after_a_failure(target_of, monkeypatch):
    target = target_of("qwen3")
    reader = FeatureReader(target, IDS)
    before = [len(layer._forward_hooks) for layer in target.parts.layers]  # transformers may keep some of its own
    reader.read(packed_batch())
    monkeypatch.setattr(target.parts.layers[2], "forward", lambda *a, **k: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        reader.read(packed_batch())
    assert [len(layer._forward_hooks) for layer in target.parts.layers] == before


def test_taps_follow_each_forward_and_leave_the_result_alone(target_of):
    target = target_of("llama")
    ids = packed_batch().ids[0]
    with torch.no_grad(), tap_layers(target, IDS) as taps:
        first = target.model(input_ids=ids[None, :20], use_cache=False).logits
        torch.testing.assert_close(taps.features()[0], hidden_states(target, ids[:20]))
        target.model(input_ids=ids[None, :5], use_cache=False)
        assert taps.features().shape == (1, 5, len(IDS) * HIDDEN)
    with torch.no_grad():
        assert torch.equal(first, target.model(input_ids=ids[None, :20], use_cache=False).logits)


def test_taps_before_any_forward_are_an_error(target_of):
    with tap_layers(target_of("llama"), IDS) as taps, pytest.raises(TargetError, match="only 0 of 5 tapped layers ran"):
        taps.features()


def test_layers_that_return_tuples_are_read(target_of, monkeypatch):
    target = target_of("llama")
    batch = packed_batch()
    expected = FeatureReader(target, (2,), "unpacked").read(batch).features
    forward = target.parts.layers[2].forward
    monkeypatch.setattr(target.parts.layers[2], "forward", lambda *a, **k: (forward(*a, **k), None))
    assert torch.equal(FeatureReader(target, (2,), "unpacked").read(batch).features, expected)


def test_two_threads_with_a_target_each(directory_of):
    """Each thread reads its own batches on its own target, both at once; hooks and stops must not cross."""
    results: dict[str, list[torch.Tensor]] = {}
    batches = [packed_batch(seed=seed) for seed in range(4)]
    readers = {family: FeatureReader(load_in(directory_of(family)), IDS) for family in ("qwen3", "qwen3_5")}
    expected = {family: [reader.read(b).features for b in batches] for family, reader in readers.items()}
    barrier = threading.Barrier(2)

    def work(family: str) -> None:
        barrier.wait()
        results[family] = [readers[family].read(b).features for b in batches]

    threads = [threading.Thread(target=work, args=(family,)) for family in readers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for family in readers:
        for got, want in zip(results[family], expected[family], strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_another_threads_forward_does_not_reach_the_taps(target_of):
    target = target_of("llama")
    ids = packed_batch().ids
    with torch.no_grad(), tap_layers(target, IDS) as taps:
        target.parts.decoder(input_ids=ids[:1, :8], use_cache=False)
        kept = taps.features()
        other = threading.Thread(target=lambda: target.parts.decoder(input_ids=ids[:1, :30], use_cache=False))
        other.start()
        other.join()
        assert torch.equal(taps.features(), kept)


def test_ids_outside_the_embedding_are_refused(target_of):
    batch = packed_batch()
    batch.ids[1, 4] = 320
    with pytest.raises(TargetError, match="batch 7: token id 320 is outside the target's 320 embedding rows"):
        FeatureReader(target_of("llama"), IDS).read(batch)


def test_features_that_are_not_finite_name_batch_row_and_layer(target_of, monkeypatch):
    target = target_of("llama")
    reader = FeatureReader(target, (1, 3))
    forward = target.parts.layers[3].forward

    def broken(*args, **kwargs):
        out = forward(*args, **kwargs).clone()
        out[1, 2, 5] = float("nan")
        return out

    monkeypatch.setattr(target.parts.layers[3], "forward", broken)
    with pytest.raises(TargetError, match=r"batch 7: features of rows \[1\] at layers \[3\] are not finite"):
        reader.read(packed_batch())


def test_chunked_attention_is_read_unpacked(target_of, monkeypatch, capsys):
    target = target_of("llama")
    monkeypatch.setattr(target.model.config, "attention_chunk_size", 8192, raising=False)
    assert FeatureReader(target, IDS).mode == "unpacked"
    assert "attend within chunks" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ((), "empty"),
        ((-1, 2), "target layer id -1 is not in 0 .. 6"),
        ((1, 7), r"target layer id 7 \(the last layer"),
        ((1, 8), "target layer id 8 is not in 0 .. 6"),
        ((3, 2), "not strictly increasing"),
        ((2, 2), "not strictly increasing"),
        ((True, 2), "target layer id True"),
        ((1.0, 2), "target layer id 1.0"),
    ],
)
def test_layer_ids_that_cannot_be_read(target_of, ids, message):
    with pytest.raises(TargetError, match=message):
        validate_layer_ids(ids, 8)
    with pytest.raises(TargetError, match=message):
        FeatureReader(target_of("llama"), ids)
    with pytest.raises(TargetError, match=message):
        tap_layers(target_of("llama"), ids)


def test_first_and_last_readable_layer_are_allowed():
    assert validate_layer_ids([0, 6], 8) == (0, 6)


def test_documents_longer_than_the_targets_positions_are_refused(target_of):
    target = target_of("llama")
    short = Target(target.model, target.tokenizer, name="short", digest="")
    short.info = dataclasses.replace(target.info, max_positions=64)
    with pytest.raises(TargetError, match="a document has 90 tokens but the target has 64 positions"):
        FeatureReader(short, IDS, "unpacked").read(packed_batch())


def test_forwards_run_in_the_devices_context(target_of, monkeypatch):
    """Unpacked documents have many lengths: without the context, each would have an attention plan built for it."""
    entered = []

    @contextlib.contextmanager
    def on_device(device):
        entered.append(device)
        yield

    monkeypatch.setattr("slipstream.target.features.on_device", on_device)
    target = target_of("llama")
    FeatureReader(target, IDS, "unpacked").read(packed_batch())
    assert entered
    assert set(entered) == {target.device}
