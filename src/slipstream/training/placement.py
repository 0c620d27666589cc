"""``slipstream plan``: who owns what, and whether each device can hold it. No weights and no data are read."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from slipstream.config import Recipe
from slipstream.drafter.store import parameter_shapes
from slipstream.errors import ConfigError
from slipstream.target.description import describe_target
from slipstream.target.features import validate_layer_ids
from slipstream.target.model import TargetInfo
from slipstream.target.source import resolve_dtype
from slipstream.topology import RankPlan, Topology, resolve_topology
from slipstream.training.hardware import resolve_attention, resolve_precision
from slipstream.training.memory import GIB, DeviceMemory, Loads, fewest_gpus, memory_by_device, refusal
from slipstream.training.optimizer import state_bytes
from slipstream.training.plan import memory_estimate
from slipstream.training.session import resolve_anchors, resolve_drafter
from slipstream.training.step import resolve_step_settings

_TIGHT = 0.9  # of what is free: beyond it the allocator's slack, which is not estimated, may be what is missing


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Who owns what, and the memory of each device of a machine. ``notes``: what the reader should know of both.

    ``refusals``: why it cannot run as it stands, a line for each device; empty: it can, as far as is known.
    """

    topology: Topology
    memory: tuple[DeviceMemory, ...]
    rows: int
    queue: int
    lockstep: bool
    notes: tuple[str, ...]
    refusals: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Return plain values; sizes in bytes."""
        topology = self.topology
        return {
            "machines": topology.machines,
            "micro_batches": topology.accumulation,
            "rows": self.rows,
            "queue": self.queue,
            "lockstep": self.lockstep,
            "why": topology.why,
            "ranks": [dataclasses.asdict(rank) for rank in topology.ranks],
            "memory": [{**dataclasses.asdict(m), "need": m.need} for m in self.memory],
            "notes": list(self.notes),
            "refusals": list(self.refusals),
        }

    def lines(self) -> Iterator[str]:
        """Yield the plan as text."""
        topology = self.topology
        replicas = sum(len(rank.replicas) for rank in topology.ranks)
        yield (
            f"{_count(topology.machines, 'machine')}, {_count(len(topology.ranks), 'rank')}, "
            f"{_count(replicas, 'target replica')}; a step is {_count(topology.accumulation, 'micro-batch', 'es')} of "
            f"{_count(self.rows, 'row')}; {self.queue} may wait for each replica"
            + ("; lockstep: a rank's replicas run one after another" if self.lockstep else "")
        )
        yield f"devices: {topology.why}"
        yield ""
        rows = [("machine", "rank", "drafter", "micro-batches", "target replicas"), *map(_cells, topology.ranks)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        for row in rows:
            yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        yield ""
        yield "memory, estimated" + (", on each machine" if topology.machines > 1 else "")
        for devices, memory in _alike(self.memory):
            free = "free: not known" if memory.free is None else f"{_gib(memory.free)} free"
            yield f"{', '.join(devices)}: {_gib(memory.need)}, {free}"
            for name, size in memory.parts.items():
                yield f"    {name:36s} {_gib(size):>12s}"
        yield from self.notes


def place(recipe: Recipe, *, machines: int = 1, gpus: int | None = None, gpu_bytes: int | None = None) -> Placement:
    """Return who owns what on ``machines`` like this one, and what each device must hold against what is free.

    ``gpus``, ``gpu_bytes``: plan for so many GPUs of so many bytes on each machine, whatever is here; of GPUs whose
    size is not given nothing is claimed. Reads the target's configuration and tokenizer. Raises ConfigError for a
    topology that cannot be, and the errors of target and drafter; what does not fit is among the ``refusals``.
    """
    here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    elsewhere = gpus is not None or gpu_bytes is not None
    if gpus is None and elsewhere and here == 0:
        raise ConfigError("--gpu-memory says how large each GPU is, but none is seen here; give --gpus N as well")
    count = here if gpus is None else gpus

    def resolved(span: int) -> Topology:
        return resolve_topology(
            recipe.topology,
            accumulation=recipe.training.accumulation,
            device=recipe.run.device,
            gpus=count,
            machines=machines,
            span=span,
        )

    topology = resolved(1)
    loads = measure(recipe, topology.kind, here=not elsewhere)
    if topology.kind == "cuda":
        every = [f"cuda:{n}" for n in range(count)]
        known = {name: (gpu_bytes, gpu_bytes) if elsewhere else torch.cuda.mem_get_info(name) for name in every}
    else:
        known = {}
    sizes = [free for free, _ in known.values() if free is not None]
    if len(sizes) > 1 and (span := fewest_gpus(loads, sizes)) > 1:
        topology = resolved(span)
    memory = []
    for device, parts in memory_by_device(topology, loads, recipe.topology.queue).items():
        free, total = known.get(device, (None, None))
        memory.append(DeviceMemory(device=device, parts=parts, free=free, total=total))
    return Placement(
        topology=topology,
        memory=tuple(memory),
        rows=recipe.training.rows,
        queue=recipe.topology.queue,
        lockstep=recipe.topology.lockstep,
        notes=tuple(_notes(topology, memory, elsewhere, gpu_bytes)),
        refusals=tuple(told for m in memory if (told := refusal(m, topology, count)) is not None),
    )


def measure(recipe: Recipe, kind: str, *, here: bool) -> Loads:
    """Return the bytes of what is placed on devices of a kind, ``cpu`` or ``cuda``, at the worst micro-batch.

    ``here``: the GPUs are this machine's; others are taken to multiply bfloat16. Raises the errors of target and
    drafter.
    """
    device = torch.device(kind, 0) if kind == "cuda" else torch.device("cpu")
    assumed = kind == "cuda" and not here
    info, tokenizer, target_parameters = describe_target(recipe.target)
    training = resolve_anchors(recipe.training, recipe.data.row_length)
    if assumed and training.precision == "auto":
        training = dataclasses.replace(training, precision="bfloat16")
    dtype = "bfloat16" if assumed and recipe.target.dtype == "auto" else recipe.target.dtype
    itemsize = resolve_dtype(dtype, device).itemsize
    precision = resolve_precision(training.precision, device)
    config = resolve_drafter(recipe, tokenizer, info, frozenset())
    validate_layer_ids(config.target_layer_ids, info.num_layers)
    settings = resolve_step_settings(
        training, block_size=config.block_size, vocab_rows=config.vocab_size, precision=precision
    )
    shapes = list(parameter_shapes(config).values())
    sizes = memory_estimate(
        training,
        config,
        row_length=recipe.data.row_length,
        weight_bytes=8 * sum(map(math.prod, shapes)) + state_bytes(shapes, training),
        target_bytes=target_parameters * itemsize,
        feature_bytes=itemsize,
        compute_bytes=precision.itemsize,
        chunk=settings.chunk,
        dense=resolve_attention(training.attention, device) == "dense",
    )
    return Loads(
        target=sizes.pop("target weights"),
        features=sizes.pop("context features"),
        target_pass=_pass_bytes(info, training.rows * recipe.data.row_length, itemsize),
        borrowed=(1 if info.tied else 2) * info.vocab_rows * info.hidden_size * itemsize,
        training=sizes,
    )


def _pass_bytes(info: TargetInfo, tokens: int, itemsize: int) -> int:
    """Return what a forward without gradient holds at its peak: about two layers' values, each made from the other."""
    per_token = 4 * info.hidden_size + 2 * (info.heads + info.kv_heads) * info.head_dim + 3 * info.intermediate_size
    return 2 * tokens * per_token * itemsize


def _notes(topology: Topology, memory: list[DeviceMemory], elsewhere: bool, gpu_bytes: int | None) -> Iterator[str]:
    if topology.kind == "cpu":
        yield "note: what is free on the cpu is not looked at"
    elif elsewhere:
        known = "" if gpu_bytes is not None else "; nothing is claimed of their memory: give --gpu-memory GIB"
        yield f"note: planned for GPUs elsewhere, which are taken to multiply bfloat16{known}"
    for m in memory:
        if m.free is not None and _TIGHT * m.free < m.need <= m.free:
            yield f"warning: {m.device} will be {m.need / m.free:.0%} full, and the allocator's slack is not counted"


def _cells(rank: RankPlan) -> tuple[str, ...]:
    first, last = rank.micro_batches[0], rank.micro_batches[-1]
    span = f"{first}" if first == last else f"{first} to {last}"
    replicas = ", ".join(f"{replica.number} on {'+'.join(replica.devices)}" for replica in rank.replicas)
    return str(rank.machine), str(rank.rank), rank.device, f"{len(rank.micro_batches)}: {span}", replicas


def _alike(memory: tuple[DeviceMemory, ...]) -> list[tuple[list[str], DeviceMemory]]:
    """Return the devices in groups that hold and have the same."""
    groups: list[tuple[list[str], DeviceMemory]] = []
    for m in memory:
        for names, first in groups:
            if (first.parts, first.free) == (m.parts, m.free):
                names.append(m.device)
                break
        else:
            groups.append(([m.device], m))
    return groups


def _count(number: int, noun: str, ending: str = "s") -> str:
    return f"{number} {noun}{'' if number == 1 else ending}"


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
