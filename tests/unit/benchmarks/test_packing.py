from __future__ import annotations

import random
import sys

import pytest
import torch

from slipstream.config import TargetConfig
from slipstream.target import features
from slipstream.target.layout import document_layout
from slipstream.target.model import load_target
from slipstream.target.recurrent import WAYS
from support.scripts import load
from support.tiny import save_tiny_target

packing = load("packing", "benchmarks")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return save_tiny_target(tmp_path_factory.mktemp("hybrid") / "target", "qwen3_5")


def test_rows_are_full_of_documents_as_asked(directory):
    info = load_target(TargetConfig(path=str(directory)), device=torch.device("cpu")).info
    layout = document_layout(packing.random_batch(0, 3, 64, (5, 20), 262, random.Random(1)), info)
    assert {d.row for d in layout.documents} == {0, 1, 2}
    assert all(5 <= d.end - d.start <= 20 for d in layout.documents)
    for row in range(3):
        assert max(d.end for d in layout.documents if d.row == row) > 64 - 20


def test_each_way_is_measured(directory, monkeypatch, capsys):
    sizes = ["--rows", "2", "--row-length", "48", "--documents", "3", "20", "--batches", "2", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", ["packing.py", str(directory), *sizes, "--dtype", "float32", "--device", "cpu"])
    packing.main()
    told = capsys.readouterr().out
    assert "packed, recurrent layers by documents: with recurrent layers by cu_seqlens, " in told
    names = [line[:44].strip() for line in told.split("tokens a second")[1].splitlines()[1:]]
    assert names == ["unpacked", "packed, recurrent layers by documents"]
    assert features.WAYS is WAYS
