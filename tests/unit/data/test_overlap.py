"""Held-out prompts are found where they begin a training document, and nowhere else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from slipstream.data import overlap
from slipstream.data.overlap import heldout_in_training, overlap_warning
from slipstream.data.pack import PackedDataset


def dataset(documents: list[list[int]]) -> PackedDataset:
    ids = np.concatenate([np.asarray(d, np.int32) for d in documents])
    starts = np.cumsum([0, *map(len, documents)])
    arrays = {
        "ids": ids,
        "loss_mask": np.ones(len(ids), bool),
        "starts": starts.astype(np.int64),
        "rows": np.arange(len(documents) + 1),
        "used_ids": np.unique(ids),
    }
    report: Any = SimpleNamespace(row_length=64)
    return PackedDataset(arrays, report=report, key="k")


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_a_prompt_is_found_at_the_head_of_a_document_only(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "_TOKENS", chunk)
    generator = np.random.default_rng(0)
    documents = [generator.integers(0, 5000, n).tolist() for n in (9, 30, 1, 12, 25, 2)]
    prompts = [
        documents[1][:10],  # a head
        documents[4][3:13],  # from the middle
        documents[5],  # a whole document
        [*documents[3], 7],  # longer than the document
        [*documents[0][:4], documents[0][4] + 1],  # last token differs
        documents[1][:10],  # twice
        documents[2],
        [],
    ]
    assert heldout_in_training(dataset(documents), prompts) == [0, 2, 5, 6]


def test_equal_hashes_are_compared_token_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "_sums", lambda ids: np.zeros(len(ids), np.uint64))
    assert heldout_in_training(dataset([[1, 2, 3]]), [[1, 2], [1, 3]]) == [0]


def test_the_warning_names_count_and_places() -> None:
    text = overlap_warning([0, 3, 4, 5, 6, 9], 20)
    assert "6 of 20 held-out prompts (number 0, 3, 4, 5, 6, ...)" in text
