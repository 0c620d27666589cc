"""Where context features come from: micro-batch index in, ``FeatureBatch`` out.

The trainer knows only ``FeatureSource``. Batch *i* is the same rows whatever computes it, so a source may read ahead in
other threads and on other GPUs, as long as it hands the batches out by index.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol

import torch

from slipstream.records import PADDING_DOCUMENT, FeatureBatch

if TYPE_CHECKING:
    from slipstream.data.pack import PackedDataset
    from slipstream.target.features import FeatureReader


class FeatureSource(Protocol):
    """Hands out micro-batches. ``tokens``: real tokens handed out so far (padding not counted).

    ``apart``: whether it reads while the drafter computes, so that each has a share of the time of its own.
    """

    tokens: int
    apart: bool

    def read(self, index: int) -> FeatureBatch:
        """Return micro-batch ``index``, on the drafter's device. Indices are asked for in rising order."""
        ...

    def seconds(self) -> float:
        """Return the time that the target took since the last call. May wait for the device."""
        ...

    def waited(self) -> float:
        """Return the time that the drafter waited for features since the last call. May wait for the device."""
        ...

    def paused(self) -> AbstractContextManager[None]:
        """Return what is entered to use a target for something else: meanwhile no thread reads with it."""
        ...

    def close(self, *, failing: bool = False) -> None:
        """Let go of threads, if there are any; nothing can be read afterwards. ``failing``: something was raised."""
        ...


class Stopwatch:
    """Adds up time spent in a section, on the device's own clock where there is one, so that nothing waits for it."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._total = 0.0
        self._began = 0.0

    def __enter__(self) -> Stopwatch:
        if self._cuda:
            self._spans.append((torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
            self._spans[-1][0].record()
        else:
            self._began = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        if self._cuda:
            self._spans[-1][1].record()
        else:
            self._total += time.perf_counter() - self._began

    def take(self) -> float:
        """Return the seconds since the last call, and start again. Waits for the device."""
        for start, end in self._spans:
            end.synchronize()
            self._total += start.elapsed_time(end) / 1000.0
        total, self._total, self._spans = self._total, 0.0, []
        return total


class TargetSource:
    """Runs the target in this thread: each index is read when it is asked for, on the target's device."""

    apart = False

    def __init__(self, dataset: PackedDataset, reader: FeatureReader, *, rows: int, seed: int) -> None:
        self.dataset = dataset
        self.reader = reader
        self.rows = rows
        self.seed = seed
        self.tokens = 0
        self._watch = Stopwatch(reader.target.device)

    def read(self, index: int) -> FeatureBatch:
        """Return micro-batch ``index``; see FeatureSource."""
        batch = self.dataset.batch(index, self.rows, self.seed)
        self.tokens += int((batch.document_ids != PADDING_DOCUMENT).sum())  # on the CPU still: no device is asked
        with self._watch:
            return self.reader.read(batch)

    def seconds(self) -> float:
        """Return the target's time; see FeatureSource."""
        return self._watch.take()

    def waited(self) -> float:
        """Return 0: what the target computes is not waiting."""
        return 0.0

    def paused(self) -> AbstractContextManager[None]:
        """Return a context that does nothing: what is read is read in this thread."""
        return nullcontext()

    def close(self, *, failing: bool = False) -> None:
        """Do nothing: there is no thread."""
