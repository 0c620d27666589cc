"""Packed rows of a hybrid target on a GPU: FLA's rule honours the bounds of documents, and nothing waits per layer.

FLA must be importable (``PYTHONPATH=.venv/fla`` where it lies aside); without it the rule is transformers' PyTorch, as
it always is for the reference on the CPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.config import TargetConfig
from slipstream.records import PackedBatch
from slipstream.target import features
from slipstream.target.features import FeatureReader
from slipstream.target.model import Target, load_target
from slipstream.target.recurrent import Way
from support.tiny import save_tiny_target

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
IDS = (0, 1, 2, 3, 6)
LAYOUTS: dict[str, tuple[tuple[tuple[int, ...], ...], int]] = {
    "shorter than the convolution": (((1, 2, 3, 1, 1, 2, 3, 3, 2, 1, 4), (1,) * 20), 24),
    "full rows": (((30, 34), (1, 63), (60, 4)), 64),
    "padding at the end": (((30, 20), (5,)), 70),
    "a document a row": (((50,), (64,), (1,), (20,)), 64),
    "chunks of the rule": (((64, 65, 63, 128), (300,)), 320),
    "long": (((700, 3, 1200), (40,) * 50), 2048),
}


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def targets(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Target, Target]:
    """Return a hybrid target on the GPU, and one of the same weights in float32 on the CPU: the reference."""
    directory: Path = tmp_path_factory.mktemp("hybrid") / "target"
    save_tiny_target(
        directory, "qwen3_5", scale=2.0, hidden_size=256, head_dim=64, linear_key_head_dim=64,
        linear_value_head_dim=64, max_position_embeddings=4096,
    )  # fmt: skip
    config = TargetConfig(path=str(directory), dtype=request.param)
    there = load_target(config, device=DEVICE)
    here = load_target(config, device=torch.device("cpu"), dtype=torch.float32)
    here.model.load_state_dict({k: v.float().cpu() for k, v in there.model.state_dict().items()})
    return there, here


@pytest.fixture(params=["cu_seqlens", "documents"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Way:
    if request.param == "cu_seqlens" and find_spec("fla") is None:
        pytest.skip("FLA is not importable: set PYTHONPATH=.venv/fla")
    if request.param == "documents":
        monkeypatch.setattr(features, "WAYS", ("documents",))
    return request.param  # type: ignore[no-any-return]


def batch_of(layout: tuple[tuple[tuple[int, ...], ...], int], seed: int = 5) -> PackedBatch:
    rows, tokens = layout
    ids = torch.randint(0, 256, (len(rows), tokens), generator=torch.Generator().manual_seed(seed))
    documents, positions = torch.full_like(ids, -1), torch.zeros_like(ids)
    for row, start, length, number in places(rows):
        documents[row, start : start + length] = number
        positions[row, start : start + length] = torch.arange(length)
    return PackedBatch(index=0, ids=ids, loss_mask=documents >= 0, document_ids=documents, positions=positions)


def places(rows: tuple[tuple[int, ...], ...]) -> Iterator[tuple[int, int, int, int]]:
    number = 0
    for row, lengths in enumerate(rows):
        start = 0
        for length in lengths:
            yield row, start, length, number
            number, start = number + 1, start + length


def alone(target: Target, batch: PackedBatch, rows: Any) -> Tensor:
    """Return each document's features, with nothing beside it, on the CPU in float32."""
    reader = FeatureReader(target, IDS, "unpacked")
    out = torch.zeros(*batch.ids.shape, len(IDS) * target.info.hidden_size)
    with torch.no_grad():
        for row, start, length, _ in places(rows):
            ids = batch.ids[row : row + 1, start : start + length].to(target.device)
            out[row, start : start + length] = reader._forward(ids)[0].float().cpu()
    return out


def apart(a: Tensor, b: Tensor, where: Tensor) -> Tensor:
    """Return the relative difference of each token of a document and tap."""
    a, b = (t[where].unflatten(-1, (len(IDS), -1)) for t in (a, b))
    return ((a - b).norm(dim=-1) / b.norm(dim=-1)).flatten()


@pytest.mark.parametrize("name", LAYOUTS)
def test_packed_is_as_near_to_the_truth_as_documents_alone(targets, way: Way, name: str):
    """Rounding takes both from what a CPU finds in float32. Packing must not take them further."""
    there, here = targets
    reader = FeatureReader(there, IDS, "packed")
    assert (reader.mode, reader.recurrent) == ("packed", way)
    batch = batch_of(LAYOUTS[name])
    where = batch.document_ids >= 0
    truth = alone(here, batch, LAYOUTS[name][0])
    packed = reader.read(batch).features.float().cpu()
    assert not packed[~where].any()
    of_packed = apart(packed, truth, where)
    of_alone = apart(alone(there, batch, LAYOUTS[name][0]), truth, where)
    told = f"{there.info.dtype} {way} {name}: "
    told += ", ".join(
        f"{what} median {found.median():.1e} 99% {found.quantile(0.99):.1e} most {found.max():.1e}"
        for what, found in (("packed", of_packed), ("alone", of_alone))
    )
    print(told)
    for part in (0.5, 0.99, 1.0):
        assert of_packed.quantile(part) <= 3 * of_alone.quantile(part) + 1e-4, told


@pytest.mark.parametrize("name", ["shorter than the convolution", "full rows", "chunks of the rule"])
def test_other_documents_do_not_reach_a_document(targets, way: Way, name: str):
    """At the same shapes the same kernels run: what does not see a change stays the same to the bit, or nearly."""
    there, _ = targets
    reader = FeatureReader(there, IDS, "packed")
    batch, other = batch_of(LAYOUTS[name]), batch_of(LAYOUTS[name], seed=6)
    kept = (batch.document_ids >= 0) & (batch.document_ids % 2 == 1)
    other.ids[kept] = batch.ids[kept]
    first, second = (reader.read(b).features.float().cpu() for b in (batch, other))
    assert float(apart(first, second, kept).max()) <= 1e-3
    assert float(apart(first, second, batch.document_ids % 2 == 0).median()) > 0.1


def waits(reader: FeatureReader, batch: PackedBatch) -> list[str]:
    """Return where reading a batch waits for the GPU, a line of code for each time."""
    torch.cuda.set_sync_debug_mode("default")  # says once in a process that it is a prototype: that is no wait
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            reader.read(batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found = [w for w in caught if "called a synchronizing" in str(w.message)]
    return sorted(f"{Path(w.filename).name}:{w.lineno}" for w in found)


def test_no_layer_waits_for_the_gpu(targets, way: Way):
    """As many waits with one recurrent layer as with six: bounds and indices are worked out once per batch."""
    there, _ = targets
    found = []
    for layers in ((0,), (6,)):
        reader = FeatureReader(there, layers, "packed")
        assert reader.recurrent == way
        reader.read(batch_of(LAYOUTS["full rows"]))  # compiles and tunes
        found.append(waits(reader, batch_of(LAYOUTS["full rows"], seed=8)))
    assert len(found[0]) == len(found[1]), found


@pytest.mark.skipif(find_spec("fla") is None, reason="FLA is not importable: set PYTHONPATH=.venv/fla")
def test_flas_rule_is_the_one_that_is_taken(targets):
    reader = FeatureReader(targets[0], IDS)
    assert reader.packing == "packed, recurrent layers by cu_seqlens"
    assert reader.reason == ""
