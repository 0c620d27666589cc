"""Target replicas in threads of their own, each ahead of the drafter by a bounded number of micro-batches.

Which replica reads which micro-batch depends on indices alone: the rank's micro-batches, in their order, go round its
replicas. So the order in which they are handed out is the order of their indices, whatever is ready first.

On GPUs a replica reads on a stream of its own and copies what it read to the drafter's device there, directly where the
devices are peers, else through the host; an event tells the drafter's stream when the copy is whole. No host waits for
a GPU: a thread waits where its queue is full, the drafter where a queue is empty.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from slipstream.compilation import verify
from slipstream.errors import TrainingError
from slipstream.records import PADDING_DOCUMENT, FeatureBatch
from slipstream.target.kernels import on_device

if TYPE_CHECKING:
    from slipstream.data.pack import PackedDataset
    from slipstream.target.features import FeatureReader

TENSORS = ("ids", "loss_mask", "document_ids", "positions")  # of a packed batch
_LOOK = 0.2  # seconds between looks whether somebody has failed or closed


@dataclass(frozen=True, slots=True)
class _Fed:
    """One micro-batch on the drafter's device, ``ready`` once its copy is whole (None on a CPU)."""

    index: int
    features: FeatureBatch
    ready: torch.cuda.Event | None
    tokens: int


class _Replica(threading.Thread):
    """One target replica's thread. ``failure``: what ended it, with its traceback, or None."""

    def __init__(self, feeder: Feeder, number: int, reader: FeatureReader) -> None:
        super().__init__(name=f"target-{number}", daemon=True)
        self.feeder, self.number, self.reader = feeder, number, reader
        self.fed: queue.Queue[_Fed] = queue.Queue(maxsize=feeder.depth)
        self.failure: BaseException | None = None
        self.reading = threading.Lock()  # held while the target computes
        self._counting = threading.Lock()
        self._seconds = 0.0
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def run(self) -> None:
        """Read until the feeder is closed or something fails."""
        try:
            verify()  # in this thread too: a guard that is not in force would be missed here first
            device = self.reader.target.device
            with contextlib.ExitStack() as streams:
                into = None
                if device.type == "cuda":
                    # Both streams are this thread's own. The default stream of the drafter's device is the drafter's: a
                    # copy that was made there would wait for all that the drafter has queued.
                    into = torch.cuda.Stream(self.feeder.device)
                    streams.enter_context(torch.cuda.stream(into))
                    if device != self.feeder.device:
                        streams.enter_context(torch.cuda.stream(torch.cuda.Stream(device)))
                streams.enter_context(on_device(device))
                self._feed(into)
        except BaseException as error:
            self.failure = error
            self.feeder.failed.set()

    def _feed(self, into: torch.cuda.Stream | None) -> None:
        for place, index in self.feeder.places(self.number):
            with self.feeder.turn(place) as mine:
                if not mine:
                    return
                fed = self._read(index, into)
            if not self._put(fed):
                return

    def _read(self, index: int, into: torch.cuda.Stream | None) -> _Fed:
        batch = self.feeder.dataset.batch(index, self.feeder.rows, self.feeder.seed)
        tokens = int((batch.document_ids != PADDING_DOCUMENT).sum())
        if into is None:
            with self.reading:
                began = time.perf_counter()
                features = self.reader.read(batch)
            with self._counting:
                self._seconds += time.perf_counter() - began
            return _Fed(index, features.to(self.feeder.device), None, tokens)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with self.reading:
            start.record()
            features = self.reader.read(batch)  # which waits for the device, so that nothing of it runs on behind
            end.record()
        with self._counting:
            self._spans.append((start, end))
        moved = features.to(self.feeder.device)
        ready = torch.cuda.Event()
        ready.record(into)
        return _Fed(index, moved, ready, tokens)

    def _put(self, fed: _Fed) -> bool:
        """Wait for room; return False where the feeder is closed meanwhile."""
        while not self.feeder.closing.is_set():
            with contextlib.suppress(queue.Full):
                self.fed.put(fed, timeout=_LOOK)
                return True
        return False

    def busy(self) -> float:
        """Return the seconds that the target has computed since the last call. Waits for the device."""
        with self._counting:
            seconds, self._seconds = self._seconds, 0.0
            spans, self._spans = self._spans, []
        for start, end in spans:
            end.synchronize()
            seconds += start.elapsed_time(end) / 1000.0
        return seconds


class Feeder:
    """A ``FeatureSource`` that reads ahead. Use from the drafter's thread; ``close`` it at the end.

    readers: one for each replica, each with a target of its own. device: the drafter's. micro_batches: of an optimizer
    step's ``accumulation`` micro-batches, those that are this rank's, rising. depth: micro-batches that may wait for
    the drafter, for each replica. lockstep: replicas read one at a time, in the order of the indices. ``tokens``: real
    tokens handed out.
    """

    apart = True

    def __init__(
        self,
        dataset: PackedDataset,
        readers: Sequence[FeatureReader],
        *,
        rows: int,
        seed: int,
        device: torch.device,
        micro_batches: Sequence[int],
        accumulation: int,
        depth: int = 2,
        lockstep: bool = False,
    ) -> None:
        self.dataset, self.rows, self.seed, self.device = dataset, rows, seed, device
        self.depth = depth
        self.tokens = 0
        self.failed, self.closing = threading.Event(), threading.Event()
        self._mine, self._accumulation = tuple(micro_batches), accumulation
        self._first = 0
        self._handed = 0
        self._waited = 0.0
        self._stalls: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._lockstep = threading.Condition() if lockstep else None
        self._turn = 0
        self._replicas = [_Replica(self, number, reader) for number, reader in enumerate(readers)]
        self._started = False

    # -- what the replicas ask

    def places(self, number: int) -> Iterator[tuple[int, int]]:
        """Yield place and index of a replica's micro-batches. Places count the rank's since reading began."""
        place = number
        while True:
            at = self._first + place
            yield place, at // len(self._mine) * self._accumulation + self._mine[at % len(self._mine)]
            place += len(self._replicas)

    @contextlib.contextmanager
    def turn(self, place: int) -> Iterator[bool]:
        """Held while a target computes; in lockstep once those before it have. Yields False where it is over."""
        if self._lockstep is None:
            yield not self.closing.is_set()
            return
        with self._lockstep:
            while self._turn != place and not (self.closing.is_set() or self.failed.is_set()):
                self._lockstep.wait(timeout=_LOOK)
            try:
                yield not (self.closing.is_set() or self.failed.is_set())
            finally:
                self._turn += 1
                self._lockstep.notify_all()

    # -- what the drafter asks

    def read(self, index: int) -> FeatureBatch:
        """Return micro-batch ``index`` on the drafter's device; the drafter's stream waits for it, the host does not.

        The first index says where reading begins. Raises what a replica's thread raised, with its traceback.
        """
        if not self._started:
            step, place = divmod(index, self._accumulation)
            self._first = step * len(self._mine) + self._mine.index(place)
            self._started = True
            for replica in self._replicas:
                replica.start()
        replica = self._replicas[self._handed % len(self._replicas)]
        began = time.perf_counter()
        fed = self._next(replica)
        self._waited += time.perf_counter() - began
        if fed.index != index:
            raise TrainingError(
                f"micro-batch {index} was asked for, and {fed.index} is next; indices must rise in order"
            )
        self._handed += 1
        self.tokens += fed.tokens
        if fed.ready is not None:
            self._hand_over(fed)
        return fed.features

    def _next(self, replica: _Replica) -> _Fed:
        """Wait for a replica's next micro-batch. Raises the failure of the first replica that has one, at once."""
        while True:
            if self.failed.is_set():
                raise next(r.failure for r in self._replicas if r.failure is not None)
            with contextlib.suppress(queue.Empty):
                return replica.fed.get(timeout=_LOOK)

    def _hand_over(self, fed: _Fed) -> None:
        """Let the drafter's stream wait for the copy, measured; keep the memory until that stream has read it."""
        assert fed.ready is not None
        stream = torch.cuda.current_stream(self.device)
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record(stream)
        stream.wait_event(fed.ready)
        after.record(stream)
        self._stalls.append((before, after))
        batch, read = fed.features.batch, fed.features
        for tensor in (read.features, read.final_states, *(getattr(batch, name) for name in TENSORS)):
            if tensor is not None and tensor.is_cuda:
                tensor.record_stream(stream)

    def seconds(self) -> float:
        """Return the seconds that a replica computed since the last call, on average. May wait for the device."""
        return sum(replica.busy() for replica in self._replicas) / len(self._replicas)

    def waited(self) -> float:
        """Return the seconds that the drafter had nothing to do since the last call. May wait for the device."""
        waited, self._waited = self._waited, 0.0
        for before, after in self._stalls:
            after.synchronize()
            waited += before.elapsed_time(after) / 1000.0
        self._stalls = []
        return waited

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """While entered no target computes for the feeder: another use of one would be disturbed by it."""
        with contextlib.ExitStack() as held:
            for replica in self._replicas:
                held.enter_context(replica.reading)
            yield

    def close(self, *, failing: bool = False) -> None:
        """End the threads: each after the micro-batch that it is at. Raises TrainingError where one does not end.

        ``failing``: something else has been raised, which must be told soon: they are hardly waited for, nothing is
        raised. They are daemons, and end with the process.
        """
        self.closing.set()
        end = time.monotonic() + (2.0 if failing else 60.0)
        for replica in self._replicas:
            if replica.is_alive():
                replica.join(timeout=max(end - time.monotonic(), 0.0))
        if failing:
            return
        stuck = [replica.name for replica in self._replicas if replica.is_alive()]
        if stuck:
            raise TrainingError(f"thread {stuck[0]} does not end; its target is stuck in a forward")
        for replica in self._replicas:
            with contextlib.suppress(queue.Empty):
                while True:
                    replica.fed.get_nowait()
