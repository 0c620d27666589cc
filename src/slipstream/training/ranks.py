"""The processes that train one drafter together: who this one is, and what they have to agree about.

A *rank* is one process with one drafter device. Every collective here is joined by every rank in every step, whatever
its rows hold: none depends on data. With a single rank nothing is sent and no process group is needed.

Two kinds of transport: tensors on a GPU go by NCCL, what the hosts agree about (whether to stop, how far the run is) by
Gloo between CPUs, so that agreeing waits for no GPU.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from slipstream.errors import TrainingError

T = TypeVar("T")

BUCKET_BYTES = 64 * 2**20  # gradients are sent in pieces of about this size: large enough for full speed


@dataclass(frozen=True, slots=True)
class Agreement:
    """What all ranks hold for true after a step. stop: some rank was told to leave; progress, finished: the first's."""

    stop: bool
    progress: float
    finished: bool


class PeerError(TrainingError):
    """Another rank has failed, or cannot be reached; this one only leaves. Never the cause of a job's end."""


@contextlib.contextmanager
def _peers() -> Iterator[None]:
    """Raise PeerError for what a collective raises when another rank is gone."""
    try:
        yield
    except (torch.OutOfMemoryError, torch.AcceleratorError):  # this rank's own
        raise
    except RuntimeError as error:
        raise PeerError(f"another rank cannot be reached: {error}") from error


class Ranks:
    """This process among its peers. One per process; use from the main thread.

    ``rank`` 0..``size``-1 over all machines; ``local_rank`` on this one. The first rank writes, shows and decodes.
    """

    def __init__(self, rank: int = 0, size: int = 1, local_rank: int = 0) -> None:
        self.rank, self.size, self.local_rank = rank, size, local_rank

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes."""
        return self.rank == 0

    def sum_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Replace each rank's gradients by the sum over all ranks, in place. All have the same shapes in one order."""
        if self.size == 1:
            return
        waiting: list[tuple[Any, Tensor, list[Tensor]]] = []
        for bucket in _buckets(gradients):
            flat = torch.cat([g.reshape(-1) for g in bucket])
            with _peers():
                waiting.append((dist.all_reduce(flat, async_op=True), flat, bucket))
        for work, flat, bucket in waiting:
            with _peers():
                work.wait()  # on a GPU the stream waits, not the host
            parts = flat.split([g.numel() for g in bucket])
            torch._foreach_copy_(bucket, [part.view_as(g) for part, g in zip(parts, bucket, strict=True)])

    def sum(self, tensor: Tensor) -> Tensor:
        """Replace a tensor by its sum over all ranks, in place, and return it."""
        if self.size > 1:
            with _peers():
                dist.all_reduce(tensor)
        return tensor

    def sum_numbers(self, *numbers: float) -> list[float]:
        """Return the sums of host numbers over all ranks."""
        found: list[float] = self.sum(torch.tensor(numbers, dtype=torch.float64)).tolist()
        return found

    def agree(self, *, stop: bool, progress: float, finished: bool) -> Agreement:
        """Return what holds for all: ``stop`` if any rank says so, the others as the first rank has them.

        Clocks differ; the first rank's decides, so that all take the same learning rate and end after the same step.
        """
        if self.size == 1:
            return Agreement(stop, progress, finished)
        told = torch.tensor([stop, progress if self.first else 0.0, finished and self.first], dtype=torch.float64)
        with _peers():
            dist.all_reduce(told, op=dist.ReduceOp.MAX)
        return Agreement(bool(told[0]), float(told[1]), bool(told[2]))

    def on_first(self, work: Callable[[], T]) -> T:
        """Let the first rank do something while the others wait; return its result on all (it must be picklable).

        Raises what ``work`` raises on the first rank, and PeerError on the others.
        """
        if self.size == 1:
            return work()
        if not self.first:
            told: list[Any] = [None]
            with _peers():
                dist.broadcast_object_list(told, src=0)
            done, value = told[0]
            if not done:
                raise PeerError(f"the first rank has failed: {value}")
            result: T = value
            return result
        try:
            made = work()
        except BaseException as error:
            with contextlib.suppress(PeerError), _peers():  # what was raised here counts, whoever hears of it
                dist.broadcast_object_list([(False, f"{type(error).__name__}: {error}")], src=0)
            raise
        with _peers():
            dist.broadcast_object_list([(True, made)], src=0)
        return made

    def require_equal(self, what: str, value: str) -> None:
        """Raise TrainingError, on every rank, unless all have the same ``value``: the first that differs is named."""
        if self.size == 1:
            return
        found: list[Any] = [None] * self.size
        with _peers():
            dist.all_gather_object(found, value)
        for rank, other in enumerate(found):
            if other != found[0]:
                raise TrainingError(
                    f"{what} is {found[0]!r} on rank 0 and {other!r} on rank {rank}; every rank needs the same"
                )


def _buckets(gradients: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return the gradients in groups of about BUCKET_BYTES."""
    out: list[list[Tensor]] = []
    size = BUCKET_BYTES
    for gradient in gradients:
        if size >= BUCKET_BYTES:
            out.append([])
            size = 0
        out[-1].append(gradient)
        size += gradient.nbytes
    return out


def launched() -> bool:
    """Say whether this process is one rank of a group: torch elastic has set its environment, all of it.

    Batch systems set a rank and a size too, for processes that have nothing to do with each other here.
    """
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def join(device: torch.device, *, timeout: float = 1800.0) -> Ranks:
    """Return this process's place; join the group that its environment names, if it names one of several ranks.

    ``device``: the drafter's. ``timeout``: seconds that a collective waits at most. Raises TrainingError where the
    group cannot be joined.
    """
    if not launched():
        return Ranks()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if size == 1:
        return Ranks(rank, size, local)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    patience = datetime.timedelta(seconds=timeout)
    try:
        dist.init_process_group(
            backend, store=_store(rank, size, patience), rank=rank, world_size=size, timeout=patience
        )
    except (RuntimeError, ValueError) as error:
        raise TrainingError(
            f"rank {rank} of {size} cannot join the others at {os.environ.get('MASTER_ADDR')}:"
            f"{os.environ.get('MASTER_PORT')}: {error}"
        ) from error
    return Ranks(rank, size, local)


def _store(rank: int, size: int, timeout: datetime.timedelta) -> Store:
    """Return the store in which ranks find each other: one of this start alone.

    Torch elastic keeps its store when it starts the ranks again. Under torch's own names they would find the addresses
    of processes that are gone, and wait for those for ever. So each start has names of its own: which start it is says
    the restart count, and, where machines have come and gone, which is not counted, how many ranks came before.
    """
    ours = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and rank == 0
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(address, port, size, is_master=ours, timeout=timeout, wait_for_workers=False)
    attempt = PrefixStore(f"slipstream/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    return PrefixStore(str((attempt.add("came", 1) - 1) // size), attempt)
