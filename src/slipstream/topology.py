"""Who owns what: which devices run the target, which train the drafter, and whose each micro-batch of a step is.

A *rank* is one drafter device and the process that trains on it. A *replica* is one copy of the target, on one device
or spread over several; it belongs to exactly one rank. All that is said here depends on the settings and on indices
alone, never on timing, so that every rank comes to the same answer by itself. Imports no torch.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.config import TopologyConfig
from slipstream.errors import ConfigError

_GPU = re.compile(r"cuda:(0|[1-9][0-9]*)")
_Spread = tuple[tuple[str, ...], ...]  # of each target replica its devices


@dataclass(frozen=True, slots=True)
class Replica:
    """One copy of the target. ``number`` counts over all machines; ``devices`` of its own machine, in layer order."""

    number: int
    devices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RankPlan:
    """One drafter device, the target replicas that feed it, and its micro-batches of every step, ascending.

    ``rank`` counts over all machines, ``local_rank`` on its ``machine``, as torchrun counts them. The micro-batches go
    round the replicas, on from step to step: two replicas with one micro-batch a step both work.
    """

    rank: int
    local_rank: int
    machine: int
    device: str
    replicas: tuple[Replica, ...]
    micro_batches: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Topology:
    """All ranks of all machines, in order. ``why``: where the devices come from, for printing."""

    ranks: tuple[RankPlan, ...]
    machines: int
    why: str = ""

    @property
    def accumulation(self) -> int:
        """Micro-batches of a step, over all ranks."""
        return sum(len(rank.micro_batches) for rank in self.ranks)

    @property
    def kind(self) -> str:
        """``cpu`` or ``cuda``: all devices are of one kind."""
        return self.ranks[0].device.partition(":")[0]

    @property
    def devices(self) -> tuple[str, ...]:
        """Every device of one machine that is used, once, the targets' first."""
        ranks = self.local(0)
        names = [name for rank in ranks for replica in rank.replicas for name in replica.devices]
        return tuple(dict.fromkeys([*names, *(rank.device for rank in ranks)]))

    def local(self, machine: int) -> tuple[RankPlan, ...]:
        """Return the ranks of one machine, counted from 0."""
        return tuple(rank for rank in self.ranks if rank.machine == machine)

    def rank_of(self, micro_batch: int) -> RankPlan:
        """Return the rank that owns micro-batch ``micro_batch`` (0 to ``accumulation`` - 1) of every step."""
        return next(rank for rank in self.ranks if micro_batch in rank.micro_batches)


def shares(total: int, counts: Sequence[int]) -> list[int]:
    """Split ``total`` in proportion to ``counts`` (each at least 1), by largest remainder; the first win ties.

    Where counts differ by one at most, nobody goes without as long as ``total`` is at least their number: the part that
    falls below 1 then has a larger remainder than any part above it.
    """
    whole = sum(counts)
    parts = [total * count // whole for count in counts]
    order = sorted(range(len(counts)), key=lambda i: (-(total * counts[i] % whole), i))
    for i in order[: total - sum(parts)]:
        parts[i] += 1
    return parts


def resolve_topology(
    config: TopologyConfig, *, accumulation: int, device: str, gpus: int, machines: int = 1, span: int = 1
) -> Topology:
    """Return who owns what. Deterministic: the same settings give the same answer on every rank.

    ``accumulation``: micro-batches of a step over all ranks. ``device``: ``run.device``. ``gpus``: of each machine.
    ``span``: GPUs that a replica needs where it is chosen here; what the recipe names is taken as it is.

    More replicas than ranks are spread evenly, the first ranks get one more. Where there are fewer, each rank still has
    a replica of its own, and several lie on the same device. Both follow the order of the lists. Micro-batches are
    shared in proportion to replicas (``shares``); a rank's lie side by side.

    Raises ConfigError for devices that do not exist, do not fit together or are named twice, and for more ranks than
    micro-batches.
    """
    if machines < 1:
        raise ConfigError(f"machines is {machines}; give 1 or more")
    targets, drafters, why = _devices(config, device, gpus, max(accumulation // machines, 1), machines, span)
    count = len(drafters)
    if accumulation < count * machines:
        where = f" ({count} on each of {machines} machines)" if machines > 1 else ""
        raise ConfigError(
            f"training.accumulation is {accumulation}, but each of {count * machines} ranks{where} needs a micro-batch "
            f"of every step; set it to {count * machines} or more, or name fewer topology.drafters"
        )
    owned = _owned(targets, count) * machines
    parts = shares(accumulation, [len(replicas) for replicas in owned])
    ranks, replica, first = [], 0, 0
    for number, (replicas, part) in enumerate(zip(owned, parts, strict=True)):
        machine, local = divmod(number, count)
        ranks.append(
            RankPlan(
                rank=number,
                local_rank=local,
                machine=machine,
                device=drafters[local],
                replicas=tuple(Replica(replica + i, devices) for i, devices in enumerate(replicas)),
                micro_batches=tuple(range(first, first + part)),
            )
        )
        replica, first = replica + len(replicas), first + part
    return Topology(tuple(ranks), machines, why)


def _owned(targets: _Spread, ranks: int) -> list[_Spread]:
    """Return the replicas of each rank of one machine."""
    if len(targets) < ranks:
        return [(targets[rank * len(targets) // ranks],) for rank in range(ranks)]
    each, more = divmod(len(targets), ranks)
    starts = [rank * each + min(rank, more) for rank in range(ranks + 1)]
    return [targets[start:end] for start, end in itertools.pairwise(starts)]


def _devices(
    config: TopologyConfig, device: str, gpus: int, most: int, machines: int, span: int
) -> tuple[_Spread, tuple[str, ...], str]:
    """Return the targets' and the drafters' devices of one machine, and why it is these.

    ``most``: ranks of a machine that would all have a micro-batch.
    """
    whole = _run_device(device, gpus)
    targets = tuple(_replica(text, gpus) for text in config.targets)
    drafters = tuple(_drafter(text, gpus) for text in config.drafters)
    _require_one_kind(targets, drafters)
    twice = [name for name in drafters if name != "cpu" and drafters.count(name) > 1]
    if twice:
        raise ConfigError(
            f"topology.drafters names {twice[0]} twice, but a GPU trains one drafter; leave one of them out"
        )
    if targets or drafters:
        _require_agreement(device, whole, targets, drafters)
    if targets and drafters:
        return targets, drafters, "as topology.targets and topology.drafters name them"
    if targets:
        drafters, told = _drafters_beside(targets, gpus, most)
        return targets, drafters, f"topology.drafters is empty: {told} chosen"
    if drafters:
        targets, told = _targets_beside(drafters, gpus, span)
        return targets, drafters, f"topology.targets is empty: {told} chosen"
    if whole is not None:
        return ((whole,),), (whole,), f"run.device is {device}: that one device for target and drafter"
    if gpus == 0:
        return (("cpu",),), ("cpu",), "no GPU: the cpu for target and drafter"
    if gpus == 1:
        return (("cuda:0",),), ("cuda:0",), "one GPU: it is for target and drafter"
    return _split(gpus, most, machines, span)


def _split(gpus: int, most: int, machines: int, span: int) -> tuple[_Spread, tuple[str, ...], str]:
    """Choose for several GPUs: as many drafters as replicas; where a replica's worth is left, one more target."""
    over = f", each target over {span} GPUs, because it does not fit on fewer" if span > 1 else ""
    if gpus <= span:
        names = tuple(f"cuda:{n}" for n in range(gpus))
        told = f"chosen for {gpus} GPUs: the target over {gpus} GPUs, because it does not fit on fewer"
        return (names,), (names[-1],), f"{told}, and the drafter on the last of them"
    wanted = gpus // (span + 1)
    ranks = min(wanted, most)
    more = ranks == wanted and gpus - ranks * (span + 1) >= span
    count = ranks + more
    targets = tuple(tuple(f"cuda:{n}" for n in range(i * span, (i + 1) * span)) for i in range(count))
    drafters = tuple(f"cuda:{count * span + n}" for n in range(ranks))
    told = "as many targets as drafters" if span > 1 else "half of them for targets, half for drafters"
    if more:
        told = "targets and drafters alike, and one more target"
    why = f"chosen for {gpus} GPUs: {told}, because both take about as long for a row{over}"
    if unused := gpus - count * span - ranks:
        why += f"; {unused} GPU{'s are' if unused > 1 else ' is'} not used"
        if ranks < wanted:
            why += f": training.accumulation = {wanted * machines} or more would use them"
    return targets, drafters, why


def _drafters_beside(targets: _Spread, gpus: int, most: int) -> tuple[tuple[str, ...], str]:
    """Choose drafters for targets: the other GPUs, or where none is left the targets' own last ones."""
    taken = {name for devices in targets for name in devices}
    if taken == {"cpu"}:
        return ("cpu",), "the cpu is"
    others = tuple(f"cuda:{n}" for n in range(gpus) if f"cuda:{n}" not in taken)
    if others:
        return others[:most], "GPUs without a target are"
    return tuple(dict.fromkeys(devices[-1] for devices in targets))[:most], "the targets' own GPUs are"


def _targets_beside(drafters: tuple[str, ...], gpus: int, span: int) -> tuple[_Spread, str]:
    """Choose targets for drafters: the other GPUs, ``span`` for each, or where too few are left the drafters' own."""
    if "cpu" in drafters:
        return (("cpu",),) * len(drafters), "the cpu is"
    others = [f"cuda:{n}" for n in range(gpus) if f"cuda:{n}" not in drafters]
    if count := len(others) // span:
        return tuple(tuple(others[i * span : (i + 1) * span]) for i in range(count)), "GPUs without a drafter are"
    if span == 1:
        return tuple((name,) for name in drafters), "the drafters' own GPUs are"
    every = [*others, *(f"cuda:{n}" for n in range(gpus) if f"cuda:{n}" in drafters)]
    return (tuple(every[:span]),), f"a target over {min(span, gpus)} GPUs, because it does not fit on fewer, is"


def _run_device(device: str, gpus: int) -> str | None:
    """Return the one device that ``run.device`` names; None for auto."""
    if device == "auto":
        return None
    if device == "cpu":
        return "cpu"
    name = "cuda:0" if device == "cuda" else device
    if not _GPU.fullmatch(name):
        raise ConfigError(f"run.device is {device!r}; use auto, cpu, cuda or cuda:N")
    _require_present(name, f"run.device is {device}", gpus)
    return name


def _require_present(name: str, said: str, gpus: int) -> None:
    if gpus == 0:
        raise ConfigError(
            f"{said}, but no GPU is seen; write cpu, or plan for GPUs elsewhere with `slipstream plan RECIPE --gpus N`"
        )
    if int(name.partition(":")[2]) >= gpus:
        there = f"there are {gpus} GPUs" if gpus > 1 else "there is 1 GPU"
        raise ConfigError(f"{said}, but {there}, counted from 0; name one of them")


def _device(text: str, whole: str, setting: str, gpus: int, forms: str) -> str:
    """Check one device's name, which is ``text`` in the entry ``whole`` of ``setting``."""
    if not whole.strip():
        raise ConfigError(f"{setting} holds an empty name; write {forms}, or leave the setting out to have it chosen")
    if text == "cuda":
        raise ConfigError(f"{setting} holds {whole!r}, which names no GPU; write cuda:0, or the number of another")
    if text != "cpu" and not _GPU.fullmatch(text):
        raise ConfigError(f"{setting} holds {whole!r}; write {forms}")
    if text != "cpu":
        _require_present(text, f"{setting} holds {text}", gpus)
    return text


def _replica(text: str, gpus: int) -> tuple[str, ...]:
    """Read an entry of ``topology.targets``."""
    setting, forms = "topology.targets", "cuda:N, cuda:N+cuda:M for one replica over several GPUs, or cpu"
    devices = tuple(_device(part, text, setting, gpus, forms) for part in text.split("+"))
    if len({name.partition(":")[0] for name in devices}) > 1:
        raise ConfigError(f"{text} in {setting} mixes cpu and cuda; spread a replica over GPUs only")
    twice = [name for name in devices if devices.count(name) > 1]
    if twice:
        raise ConfigError(
            f"{text} in {setting} names {twice[0]} twice; name each device of a replica once, or give two entries for "
            "two replicas"
        )
    return devices


def _drafter(text: str, gpus: int) -> str:
    """Read an entry of ``topology.drafters``."""
    if "+" in text:
        raise ConfigError(f"topology.drafters holds {text}, but a rank has one device; give each its own entry")
    return _device(text, text, "topology.drafters", gpus, "cuda:N or cpu")


def _require_one_kind(targets: _Spread, drafters: tuple[str, ...]) -> None:
    """Refuse cpu and cuda in one run: features would differ from replica to replica, and ranks could not sum."""
    kinds = {
        "topology.targets": {name.partition(":")[0] for devices in targets for name in devices},
        "topology.drafters": {name.partition(":")[0] for name in drafters},
    }
    for setting, found in kinds.items():
        if len(found) > 1:
            raise ConfigError(f"{setting} mixes cpu and cuda, which compute in different precision; use one kind")
    (target,), (drafter,) = (found or {""} for found in kinds.values())
    if target and drafter and target != drafter:
        raise ConfigError(
            f"topology.targets is on {target} and topology.drafters on {drafter}; use one kind of device for both"
        )


def _require_agreement(device: str, whole: str | None, targets: _Spread, drafters: tuple[str, ...]) -> None:
    """Refuse a ``run.device`` that says something else than the lists do."""
    if whole is None:
        return
    kind = (targets[0][0] if targets else drafters[0]).partition(":")[0]
    if whole.partition(":")[0] != kind:
        named = "cuda devices" if kind == "cuda" else "cpu"
        raise ConfigError(f"run.device is {device}, but topology names {named}; leave run.device at auto")
    if ":" in device and drafters != (device,):
        told = " ".join(drafters) or "empty"
        raise ConfigError(f"run.device is {device}, but topology.drafters is {told}; leave run.device at auto")
