"""Data set to batches: layout of rows, order of epochs, and the cache under it."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.config import DataConfig
from slipstream.data.fit import pack_samples
from slipstream.data.pack import PackedDataset, build_dataset, dataset_key, tokenizer_digest
from slipstream.data.render import Renderer, RenderStats
from slipstream.errors import DataError
from slipstream.records import RenderedSample
from support.tiny import CHATML, THINKING, tiny_tokenizer, write_conversations

ROW = 16


def packed(lengths: list[int], prompts: list[int] | None = None) -> PackedDataset:
    """A data set of samples whose ids tell document and place: 100*document + place."""
    samples = [
        RenderedSample(
            ids=np.arange(n, dtype=np.int32) + 100 * i,
            loss_mask=np.arange(n) >= (prompts[i] if prompts else 0),
            origin="o",
        )
        for i, n in enumerate(lengths)
    ]
    arrays, report = pack_samples(samples, DataConfig(row_length=ROW), RenderStats(conversations=len(samples)))
    return PackedDataset(arrays, report=report, key="k")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(2, ROW), min_size=1, max_size=25), st.integers(1, 5), st.integers(0, 3))
def test_an_epoch_of_batches_holds_every_document_whole_once(lengths: list[int], rows: int, seed: int) -> None:
    dataset = packed(lengths, [n // 3 for n in lengths])
    seen: list[int] = []
    place = 0
    for index in range(-(-len(dataset) // rows)):
        batch = dataset.batch(index, rows, seed)
        assert batch.ids.shape == (rows, ROW)
        for r in range(rows):
            if place >= len(dataset):
                break  # filled from the next epoch
            place += 1
            ids, mask = batch.ids[r].numpy(), batch.loss_mask[r].numpy()
            documents, positions = batch.document_ids[r].numpy(), batch.positions[r].numpy()
            padding = documents == -1
            assert not mask[padding].any()
            assert not positions[padding].any()
            assert (np.diff(documents[~padding]) >= 0).all()
            used = int((~padding).sum())
            assert not padding[:used].any()
            for d in range(documents.max() + 1):
                here = documents == d
                number = int(ids[here][0]) // 100
                seen.append(number)
                assert positions[here].tolist() == list(range(lengths[number]))
                assert ids[here].tolist() == [100 * number + p for p in range(lengths[number])]
                assert mask[here].tolist() == [p >= lengths[number] // 3 for p in range(lengths[number])]
    assert sorted(seen) == list(range(len(lengths)))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 2**64), st.integers(2, 5))
def test_epochs_are_permutations_without_gaps(count: int, rows: int, seed: int, epochs: int) -> None:
    dataset = packed([ROW] * count)
    steps = -(-count * epochs // rows)
    stream = np.concatenate([dataset.row_numbers(i, rows, seed) for i in range(steps)])
    for epoch in range(epochs):
        assert sorted(stream[epoch * count : (epoch + 1) * count]) == list(range(count))
    # The order does not depend on the number of rows of a batch.
    np.testing.assert_array_equal(stream, [dataset.row_numbers(i, 1, seed)[0] for i in range(len(stream))])


def test_order_depends_on_seed_and_epoch_and_is_fixed_for_good() -> None:
    dataset = packed([ROW] * 8)
    first, second = dataset.row_numbers(0, 8, 0), dataset.row_numbers(1, 8, 0)
    assert first.tolist() != second.tolist()
    assert first.tolist() != dataset.row_numbers(0, 8, 1).tolist()
    # A resumed run must find the same rows, with any numpy: these numbers may never change.
    assert first.tolist() == FIRST_EPOCH
    assert dataset.row_numbers(10**9, 3, 7).shape == (3,)


FIRST_EPOCH = [0, 2, 1, 5, 4, 3, 6, 7]


def test_batches_are_equal_from_any_thread() -> None:
    dataset = packed([5, 9, 16, 3, 8, 2, 7] * 5)
    want = [dataset.batch(i, 3, 1) for i in range(40)]
    wrong: list[int] = []
    gate = threading.Barrier(4)

    def work() -> None:
        gate.wait()
        for i in reversed(range(40)):
            got = dataset.batch(i, 3, 1)
            if not all(
                (getattr(got, n) == getattr(want[i], n)).all()
                for n in ("ids", "loss_mask", "document_ids", "positions")
            ):
                wrong.append(i)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_batch_dtypes_and_bad_arguments() -> None:
    import torch

    batch = packed([5]).batch(4, 2, 0)
    assert batch.index == 4
    assert (batch.ids.dtype, batch.loss_mask.dtype) == (torch.int64, torch.bool)
    assert (batch.document_ids.dtype, batch.positions.dtype) == (torch.int64, torch.int64)
    with pytest.raises(ValueError, match="index is -1"):
        packed([5]).batch(-1, 2, 0)


def test_documents_and_used_ids() -> None:
    dataset = packed([3, 2])
    assert sorted(ids.tolist() for ids, _ in dataset.documents()) == [[0, 1, 2], [100, 101]]
    assert dataset.used_ids == {0, 1, 2, 100, 101}


def settings_for(path: Path, **changes: Any) -> DataConfig:
    return DataConfig(**{"train": (str(path),), "row_length": 256, **changes})


def test_built_rows_are_the_rendered_samples(tmp_path: Path) -> None:
    path = write_conversations(tmp_path / "c.jsonl", 12, turns=2)
    tokenizer = tiny_tokenizer(THINKING)
    told: list[int] = []
    dataset = build_dataset(settings_for(path), tokenizer, cache_dir=tmp_path / "cache", progress=told.append)
    from slipstream.data.conversations import read_conversations

    renderer = Renderer(tokenizer, data=DataConfig())
    want = [s for c in read_conversations([str(path)]) for s in renderer.render(c)]
    got = sorted((ids.tolist(), mask.tolist()) for ids, mask in dataset.documents())
    assert got == sorted((s.ids.tolist(), s.loss_mask.tolist()) for s in want)
    assert dataset.report.fanned_out == 12
    assert dataset.report.samples == 24
    assert told[-1] == 12
    assert dataset.row_length == 256


def test_the_cache_is_used_and_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_conversations(tmp_path / "c.jsonl", 12)
    data, tokenizer = settings_for(path), tiny_tokenizer()
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    first = build_dataset(data, tokenizer)
    assert [p.suffix for p in (tmp_path / "cache" / "packed").iterdir() if p.suffix != ".lock"] == [".safetensors"]
    monkeypatch.setattr(Renderer, "render_many", None)  # rendering again would fail
    second = build_dataset(data, tiny_tokenizer())
    assert (first.report, first.key, second.notes) == (second.report, second.key, ())
    a, b = first.batch(3, 4, 5), second.batch(3, 4, 5)
    assert (a.ids == b.ids).all()
    assert (a.loss_mask == b.loss_mask).all()


def test_the_key_follows_content_tokenizer_template_and_settings(tmp_path: Path) -> None:
    path = write_conversations(tmp_path / "c.jsonl", 3)
    data = settings_for(path)
    key = dataset_key(data, tiny_tokenizer())
    assert key == dataset_key(data, tiny_tokenizer())
    assert key == dataset_key(settings_for(path, heldout=("other.jsonl",)), tiny_tokenizer())
    others = [dataset_key(data, tiny_tokenizer(THINKING)), dataset_key(data, tiny_tokenizer(), [5])]
    for change in (
        {"row_length": 128}, {"over_long": "drop"}, {"history": "error"}, {"last_turn_only": True}, {"thinking": "on"},
        {"prompt_completion": "raw"}, {"template_kwargs": {"a": 1}}, {"max_samples": 2},
        {"train": (str(path), str(path))},
    ):  # fmt: skip
        others.append(dataset_key(settings_for(path, **change), tiny_tokenizer()))
    grown = tiny_tokenizer()
    grown.add_tokens(["new"])
    others.append(dataset_key(data, grown))
    write_conversations(path, 4)
    others.append(dataset_key(data, tiny_tokenizer()))
    assert len({key, *others}) == len(others) + 1


def test_tokenizer_digest_survives_saving(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tiny_tokenizer().save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    digest = tokenizer_digest(loaded)
    assert digest == tokenizer_digest(AutoTokenizer.from_pretrained(tmp_path))
    loaded(["use it", "pad it"], padding=True, truncation=True, max_length=3)
    assert tokenizer_digest(loaded) == digest


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "text"])
def test_a_damaged_cache_is_rebuilt_and_said(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    path = write_conversations(tmp_path / "c.jsonl", 6)
    data, tokenizer = settings_for(path), tiny_tokenizer()
    first = build_dataset(data, tokenizer, cache_dir=tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    good = file.read_bytes()
    bad = {"cut": good[:-9], "flip": good[:-9] + b"\x7f" + good[-8:], "empty": b"", "text": b"not a cache"}[damage]
    file.unlink()
    file.write_bytes(bad)
    again = build_dataset(data, tokenizer, cache_dir=tmp_path)
    assert again.report == first.report
    assert "was damaged" in again.notes[0]
    assert "has been rebuilt" in caplog.text
    assert file.read_bytes() == good
    assert build_dataset(data, tokenizer, cache_dir=tmp_path).notes == ()


def test_processes_that_build_at_once_agree(tmp_path: Path) -> None:
    path = write_conversations(tmp_path / "c.jsonl", 40)
    got: list[tuple[str, int]] = []
    gate = threading.Barrier(4)

    def work() -> None:
        tokenizer = tiny_tokenizer()
        gate.wait()
        dataset = build_dataset(settings_for(path), tokenizer, cache_dir=tmp_path / "cache")
        got.append((dataset.key, int(dataset.batch(0, 2, 0).ids.sum())))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 4
    assert len(set(got)) == 1
    assert len(list((tmp_path / "cache").glob("*.safetensors"))) == 1
    assert not list((tmp_path / "cache").glob("*.tmp"))


def test_bad_data_sets(tmp_path: Path) -> None:
    def build(rows: list[dict[str, Any]] | str, template: str | None = CHATML, **changes: Any) -> PackedDataset:
        path = tmp_path / "bad.jsonl"
        path.write_text(rows if isinstance(rows, str) else "".join(json.dumps(r) + "\n" for r in rows))
        return build_dataset(settings_for(path, **changes), tiny_tokenizer(template), cache_dir=tmp_path / "cache")

    user, answer = {"role": "user", "content": "x" * 300}, {"role": "assistant", "content": "yes"}
    with pytest.raises(DataError, match=r"data\.train is empty"):
        build_dataset(DataConfig(), tiny_tokenizer(), cache_dir=tmp_path)
    with pytest.raises(DataError, match="does not exist"):
        build_dataset(settings_for(tmp_path / "gone.jsonl"), tiny_tokenizer(), cache_dir=tmp_path)
    with pytest.raises(DataError, match=r"bad\.jsonl is empty"):
        build("")
    with pytest.raises(DataError, match="no supervised token anywhere"):
        build([{"messages": [user]}])
    with pytest.raises(DataError, match="no answer token fits behind its prompt"):
        build([{"messages": [user, answer]}])
    with pytest.raises(DataError, match="no sample fits in a row"):
        build([{"messages": [user, answer]}], over_long="drop")
    with pytest.raises(DataError, match="no chat template"):
        build([{"messages": [user, answer]}], None)
    with pytest.raises(DataError, match=r"bad\.jsonl:7: malformed JSON"):
        build(json.dumps({"messages": [user, answer]}) + "\n" + "\n" * 5 + "{oops\n")
    assert not list((tmp_path / "cache").glob("*.safetensors"))  # a failure caches nothing


def test_reading_and_packing_load_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; import slipstream.data.conversations, slipstream.data.render, slipstream.data.pack, "
        "slipstream.data.regenerate; sys.exit('torch' in sys.modules)"
    )
    source = Path(__file__).resolve().parents[3] / "src"
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(source)}, check=False).returncode == 0
