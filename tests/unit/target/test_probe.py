from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.errors import TargetError
from slipstream.target.model import Target
from slipstream.target.probe import PackingProbe, probe_batches
from unit.target.conftest import documents_of, load_in

TAPS, HIDDEN = 2, 64


class Reader:
    """Reads features that are a function of id and position, wrong in the ways that a test asks for."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.table = torch.randn(320, 128, TAPS * HIDDEN, generator=torch.Generator().manual_seed(1))

    def alone(self, ids: Tensor) -> Tensor:
        return self.table[ids[0], torch.arange(ids.shape[1])]

    def packed(self, batch: Any, _layout: Any) -> Tensor:
        return self.table[batch.ids, batch.positions]

    def probe(self) -> PackingProbe:
        return PackingProbe(self.target, TAPS, self.alone)


@pytest.fixture(params=[torch.float32, torch.bfloat16])
def reader(request, directory_of) -> Reader:
    return Reader(load_in(directory_of("llama"), request.param))


def test_batches_differ_in_every_other_document(target_of):
    first, second = probe_batches(target_of("llama"))
    changed = [not torch.equal(first.ids[place], second.ids[place]) for place in documents_of(first)]
    assert changed == [number % 2 == 0 for number in range(11)]
    assert torch.equal(first.document_ids, second.document_ids)
    assert max(place.stop - place.start for _, place in documents_of(first)) > 64


def test_documents_are_no_longer_than_the_targets_positions(target_of):
    target = target_of("llama")
    short = Target(target.model, target.tokenizer, name="short", digest="")
    short.info = dataclasses.replace(target.info, max_positions=20)
    first, _ = probe_batches(short)
    assert int(first.positions.max()) == 19
    Reader(short).probe()


def test_features_that_are_those_alone_pass(reader):
    assert reader.probe().judge(reader.packed, "leak") == ("", 0.0)
    assert reader.probe().judge(reader.packed, "leak", lambda batch, layout: reader.packed(batch, layout) + 1)[0] == ""


def test_rounding_passes_below_float32_only(reader):
    def rounded(batch, layout):
        features = reader.packed(batch, layout)
        noise = torch.randn(features.shape, generator=torch.Generator().manual_seed(2))
        return features + 1e-2 * noise

    found, difference = reader.probe().judge(rounded, "leak")
    assert (found == "") == (reader.target.dtype == torch.bfloat16)
    assert 5e-3 < difference < 3e-2


@pytest.mark.parametrize("error", [ValueError, TypeError, NotImplementedError, TargetError])
def test_rows_that_are_refused(reader, error):
    def refused(_batch, _layout):
        raise error("no\nrows")

    assert reader.probe().judge(refused, "leak") == ("it refuses packed rows: no rows", 0.0)


def test_other_errors_are_not_taken_for_a_refusal(reader):
    def broken(_batch, _layout):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        reader.probe().judge(broken, "leak")


def test_what_changes_nothing_is_ignored(reader):
    found, _ = reader.probe().judge(reader.packed, "leak", reader.packed)
    assert found == "its kernels ignore the bounds of documents"


@pytest.mark.parametrize("size", [1.0, 0.1])
def test_a_leak_is_found_in_one_token_of_one_document(reader, size):
    """The second token of the second document sees the document before it."""

    def leaking(batch, layout):
        features = reader.packed(batch, layout).clone()
        features[0, 4] += size * reader.table[batch.ids[0, 0], 0]
        return features

    found, difference = reader.probe().judge(leaking, "leak")
    assert found.startswith("leak (packed and alone differ by ")
    assert difference > 0.05


def test_what_is_lost_at_the_start_of_documents_is_found(reader):
    """No document sees another, and most tokens are as alone: only the first ones are wrong."""

    def lost(batch, layout):
        features = reader.packed(batch, layout)
        return torch.where((batch.positions < 4)[..., None], features.roll(1, dims=-1) * 0.05 + features, features)

    found, difference = reader.probe().judge(lost, "leak")
    assert found.startswith("leak ")
    assert difference < 0.1
