"""What each device of a topology must hold, estimated, and the cure where that is more than is free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slipstream.topology import Topology

GIB = 2**30
CONTEXT = GIB // 2  # a process's CUDA context and its libraries' workspaces, about, on each GPU that it uses
NOT_FREE = 2 * GIB  # less than this taken on a GPU is the driver's and our own

TARGET = "target weights"
TARGET_PASS = "target's own pass"
DRAFTER = "drafter weights, gradients, moments"
ACTIVATIONS = "activations"
LOGITS = "logits"
DENSE = "dense attention"
FEATURES = "features"
BORROWED = "target's embedding and head"
CONTEXTS = "CUDA context"

# What makes each part smaller, for the largest of a device.
_CURES = {
    TARGET_PASS: "lower data.row_length or training.rows",
    DRAFTER: "lower drafter.layers, or take training.optimizer = muon, which has one moment instead of two",
    ACTIVATIONS: "lower training.anchors, training.rows or data.row_length",
    LOGITS: "lower training.head_chunk",
    DENSE: "take training.attention = flex, or lower training.anchors",
    FEATURES: "lower topology.queue, data.row_length or training.rows",
    BORROWED: "put the rank's first target replica on the same GPU, whose embedding and head are then shared",
    CONTEXTS: "let fewer ranks use it",
}


@dataclass(frozen=True, kw_only=True)
class Loads:
    """Bytes of what is placed. ``training``: by use, what a drafter's device holds for its own training.

    ``target``: a replica's weights; ``target_pass``: what its forward needs for a moment; ``features``: one
    micro-batch's; ``borrowed``: the target's embedding and head, which a drafter needs beside it.
    """

    target: int
    target_pass: int
    features: int
    borrowed: int
    training: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """Bytes by use on one device, and what it has. ``free`` and ``total`` are None where nothing is known of it."""

    device: str
    parts: Mapping[str, int]
    free: int | None
    total: int | None

    @property
    def need(self) -> int:
        """All parts together."""
        return sum(self.parts.values())


def memory_by_device(topology: Topology, loads: Loads, queue: int) -> dict[str, dict[str, int]]:
    """Return bytes by use on each device of a machine, in the order of ``topology.devices``.

    A spread replica's weights lie in equal parts. Features are made on its last device; on the drafter's lie those that
    are trained on, and for each replica ``queue`` that wait and one that is ready and waits for room. A rank whose only
    replica shares its device reads when it needs: nothing waits. Embedding and head are the first replica's, if it lies
    on the drafter's device.
    """
    found: dict[str, dict[str, int]] = {device: {} for device in topology.devices}

    def add(device: str, name: str, size: int) -> None:
        found[device][name] = found[device].get(name, 0) + size

    for rank in topology.local(0):
        for replica in rank.replicas:
            for device in replica.devices:
                add(device, TARGET, -(-loads.target // len(replica.devices)))
                add(device, TARGET_PASS, loads.target_pass)
            if replica.devices[-1] != rank.device:
                add(replica.devices[-1], FEATURES, loads.features)
        for name, size in loads.training.items():
            add(rank.device, name, size)
        shared = rank.replicas[0].devices == (rank.device,)
        if not shared:
            add(rank.device, BORROWED, loads.borrowed)
        waiting = 0 if shared and len(rank.replicas) == 1 else (queue + 1) * len(rank.replicas)
        add(rank.device, FEATURES, loads.features * (1 + waiting))
        for device in {rank.device, *(name for replica in rank.replicas for name in replica.devices)} - {"cpu"}:
            add(device, CONTEXTS, CONTEXT)
    return found


def fewest_gpus(loads: Loads, free: Sequence[int]) -> int:
    """Return over how many GPUs with so many bytes free a replica has to be spread: the fewest that hold it.

    Nothing else is counted on them but what a target's GPU holds. All where none is enough; 1 where more do not help.
    """
    beside = loads.target_pass + loads.features + CONTEXT
    if beside >= min(free):
        return 1
    for count in range(1, len(free) + 1):
        if -(-loads.target // count) + beside <= min(free):
            return count
    return len(free)


def refusal(memory: DeviceMemory, topology: Topology, gpus: int) -> str | None:
    """Return in one line why a device cannot hold its part, and the cure; None where it can or nothing is known."""
    need, free, total = memory.need, memory.free, memory.total
    if free is None or need <= free:
        return None
    largest = max(memory.parts, key=lambda name: memory.parts[name])
    told = (
        f"{memory.device} needs about {_gib(need)} and has {_gib(free)} free; most is {largest}, "
        f"{_gib(memory.parts[largest])}"
    )
    cures = []
    if total is not None and need <= total and total - free > NOT_FREE:
        cures.append(f"{_gib(total - free)} of its {_gib(total)} are taken: end what runs there")
    replicas = [r for rank in topology.local(0) for r in rank.replicas if memory.device in r.devices]
    if len(replicas) > 1:
        cures.append(
            f"{len(replicas)} target replicas are on it: name more topology.targets, or fewer topology.drafters"
        )
    elif replicas and DRAFTER in memory.parts and gpus > 1:
        cures.append("put target and drafter on different GPUs (topology.drafters)")
    if largest != TARGET:
        cures.append(_CURES[largest])
    elif gpus == 1:
        cures.append("take a larger GPU, or several")
    elif len(replicas) == 1 and DRAFTER not in memory.parts:
        wider = len(replicas[0].devices) + 1
        if wider <= gpus:
            example = "+".join(f"cuda:{n}" for n in range(wider))
            cures.append(f'spread each replica over more GPUs, as topology.targets = "{example}"')
        else:
            cures.append("take larger GPUs, or more of them")
    return f"{told}; {', or '.join(cures)}"


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
