"""Target replicas in threads: the order of indices, whatever is ready first; bounds; failures; a clean end."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slipstream.compilation import install
from slipstream.config import TopologyConfig
from slipstream.errors import TargetError, TrainingError
from slipstream.records import FeatureBatch, PackedBatch
from slipstream.topology import resolve_topology
from slipstream.training import loop
from slipstream.training.feeder import Feeder
from support.tiny_run import make_inputs, quiet_train, tiny_recipe

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _installed() -> None:
    install()


class Rows:
    """Batches that say their index, with two padded tokens each."""

    def batch(self, index: int, rows: int, seed: int) -> PackedBatch:
        ids = torch.full((rows, 6), index)
        documents = torch.zeros_like(ids)
        documents[:, -1] = -1
        return PackedBatch(index=index, ids=ids, loss_mask=ids > 0, document_ids=documents, positions=ids)


class Reader:
    """A target that takes its time, and remembers when it read what."""

    def __init__(self, seconds: Callable[[int], float] = lambda _: 0.0) -> None:
        self.target = SimpleNamespace(device=CPU)
        self.seconds = seconds
        self.read_: list[int] = []
        self.spans: list[tuple[float, float]] = []

    def read(self, batch: PackedBatch) -> FeatureBatch:
        began = time.perf_counter()
        time.sleep(self.seconds(batch.index))
        self.read_.append(batch.index)
        self.spans.append((began, time.perf_counter()))
        return FeatureBatch(batch=batch, features=torch.full((2, 6, 3), float(batch.index)))


@contextmanager
def feeding(
    readers: Sequence[Any], mine: Sequence[int] = (0,), accumulation: int = 1, **settings: Any
) -> Iterator[Feeder]:
    rows: Any = Rows()
    feeder = Feeder(
        rows, readers, rows=2, seed=0, device=CPU, micro_batches=mine, accumulation=accumulation, **settings
    )
    try:
        yield feeder
    finally:
        feeder.close()
        assert not [t for t in threading.enumerate() if t.name.startswith("target-")]


def indices(mine: Sequence[int], accumulation: int, steps: range) -> list[int]:
    return [step * accumulation + place for step in steps for place in mine]


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize(("mine", "accumulation"), [((0,), 1), ((2, 3), 5), ((0, 1, 2), 3)])
@pytest.mark.parametrize("lockstep", [False, True])
@pytest.mark.parametrize("begin", [0, 7])
def test_features_come_in_the_order_of_the_indices(
    replicas: int, mine: tuple[int, ...], accumulation: int, lockstep: bool, begin: int
) -> None:
    readers = [Reader(lambda index: 0.002 * (index % 3)) for _ in range(replicas)]
    wanted = indices(mine, accumulation, range(begin, begin + 6))
    with feeding(readers, mine, accumulation, lockstep=lockstep) as feeder:
        for index in wanted:
            found = feeder.read(index)
            assert found.batch.index == index
            assert torch.equal(found.features, torch.full((2, 6, 3), float(index)))
        assert feeder.tokens == len(wanted) * 10
    for number, reader in enumerate(readers):  # round the replicas, by place alone
        assert reader.read_[: len(wanted) // replicas] == wanted[number::replicas][: len(wanted) // replicas]


def test_a_replica_is_ahead_by_its_queue_and_no_more() -> None:
    reader = Reader()
    with feeding([reader], depth=3) as feeder:
        feeder.read(0)
        time.sleep(0.3)
        assert len(reader.read_) == 1 + 3 + 1  # handed out, waiting, and the one that finds no room
        feeder.read(1)
        time.sleep(0.3)
        assert len(reader.read_) == 6


def test_replicas_read_at_once_and_in_lockstep_one_after_another() -> None:
    for lockstep in (False, True):
        readers = [Reader(lambda _: 0.05) for _ in range(2)]
        with feeding(readers, lockstep=lockstep) as feeder:
            for index in range(6):
                feeder.read(index)
        spans = sorted(span for reader in readers for span in reader.spans)
        overlaps = sum(later[0] < earlier[1] for earlier, later in itertools.pairwise(spans))
        assert overlaps == 0 if lockstep else overlaps >= 3


def test_the_busy_and_the_waiting_are_told_apart() -> None:
    slow, quick = Reader(lambda _: 0.1), Reader()
    with feeding([slow]) as feeder:
        for index in range(4):
            feeder.read(index)
        assert 0.3 < feeder.seconds() < 1.0
        assert 0.3 < feeder.waited() < 1.0
    with feeding([quick]) as feeder:
        feeder.read(0)
        feeder.seconds(), feeder.waited()
        for index in range(1, 4):
            time.sleep(0.05)
            feeder.read(index)
        assert feeder.seconds() < 0.05
        assert feeder.waited() < 0.05


def test_a_failure_comes_at_once_with_its_own_traceback() -> None:
    class Failing(Reader):
        def read(self, batch: PackedBatch) -> FeatureBatch:
            if batch.index == 3:
                raise TargetError("features of rows [1] are not finite")
            return super().read(batch)

    began = time.perf_counter()
    with feeding([Reader(lambda _: 0.02), Failing()]) as feeder:
        feeder.read(0)
        feeder.failed.wait(5)
        with pytest.raises(TargetError, match="rows") as caught:
            feeder.read(1)  # which is ready: what has failed is told first
    assert "read" in [entry.name for entry in caught.traceback]
    assert str(caught.traceback[-1].path).endswith("test_feeder.py")
    assert time.perf_counter() - began < 5


def test_an_index_out_of_order_is_refused() -> None:
    with feeding([Reader()]) as feeder:
        feeder.read(4)
        with pytest.raises(TrainingError, match="6 was asked for, and 5 is next"):
            feeder.read(6)


def test_no_target_computes_while_the_feeder_is_paused() -> None:
    readers = [Reader(lambda _: 0.02) for _ in range(2)]
    with feeding(readers, depth=50) as feeder:
        feeder.read(0)
        with feeder.paused():
            before = [list(reader.read_) for reader in readers]
            time.sleep(0.2)
            assert [reader.read_ for reader in readers] == before
        feeder.read(1)
        assert feeder.read(2).batch.index == 2


def test_a_stuck_target_does_not_hide_what_is_being_raised() -> None:
    going_on = threading.Event()

    class Stuck(Reader):
        def read(self, batch: PackedBatch) -> FeatureBatch:
            going_on.wait(30)
            return super().read(batch)

    with feeding([Reader(), Stuck()]) as feeder:
        feeder.read(0)
        began = time.perf_counter()
        feeder.close(failing=True)
        assert time.perf_counter() - began < 10
        going_on.set()


def test_closing_ends_threads_that_find_no_room_and_may_be_repeated() -> None:
    with feeding([Reader(), Reader()], depth=1, lockstep=True) as feeder:
        feeder.read(0)
        time.sleep(0.1)
        feeder.close()
    with feeding([Reader()]):
        pass  # never begun


def test_held_out_prompts_are_decoded_while_the_targets_threads_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainers: list[loop.Trainer] = []
    locked: list[bool] = []

    class Watched(loop.Trainer):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            trainers.append(self)

    genuine = loop.decoded_acceptance

    def decoded(*args: Any) -> dict[str, Any]:
        source: Any = trainers[0].source
        locked.append(all(replica.reading.locked() for replica in source._replicas))
        return genuine(*args)

    monkeypatch.setattr(loop, "decoded_acceptance", decoded)
    root = make_inputs(tmp_path)
    recipe = tiny_recipe(root, root / "run", data__heldout=root / "heldout.jsonl", training__preflight="false")
    topology = resolve_topology(
        TopologyConfig(targets=("cpu", "cpu"), drafters=("cpu",)), accumulation=1, device="cpu", gpus=0
    )
    quiet_train(recipe, place=topology.ranks[0], loop=Watched)
    assert locked == [True]
