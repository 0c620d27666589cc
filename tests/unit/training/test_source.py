"""Batches by index, tokens counted without padding, time taken."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from slipstream.records import FeatureBatch, PackedBatch
from slipstream.training.source import Stopwatch, TargetSource


class Rows:
    def batch(self, index: int, rows: int, seed: int) -> PackedBatch:
        shape = (rows, 8)
        documents = torch.zeros(shape, dtype=torch.long)
        documents[:, 5 + index :] = -1
        return PackedBatch(
            index=index,
            ids=torch.full(shape, seed),
            loss_mask=documents >= 0,
            document_ids=documents,
            positions=torch.zeros(shape, dtype=torch.long),
        )


class Reader:
    target = SimpleNamespace(device=torch.device("cpu"))

    def read(self, batch: PackedBatch) -> FeatureBatch:
        return FeatureBatch(batch=batch, features=torch.zeros(*batch.ids.shape, 4))


def test_reads_by_index_and_counts_real_tokens():
    rows: Any = Rows()
    reader: Any = Reader()
    source = TargetSource(rows, reader, rows=2, seed=9)
    found = source.read(1)
    assert found.batch.index == 1
    assert int(found.batch.ids[0, 0]) == 9
    assert source.tokens == 12
    source.read(0)
    assert source.tokens == 22
    assert source.seconds() > 0
    assert source.seconds() == 0


def test_stopwatch_adds_up_sections():
    watch = Stopwatch(torch.device("cpu"))
    for _ in range(3):
        with watch:
            pass
    assert watch.take() > 0
    assert watch.take() == 0
