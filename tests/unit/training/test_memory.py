"""What each device must hold: every part counted where it lies, and the cure for what does not fit."""

from __future__ import annotations

import pytest

from slipstream.config import TopologyConfig
from slipstream.topology import Topology, resolve_topology
from slipstream.training.memory import CONTEXT, GIB, DeviceMemory, Loads, fewest_gpus, memory_by_device, refusal

LOADS = Loads(
    target=54 * GIB,
    target_pass=1 * GIB,
    features=GIB // 4,
    borrowed=5 * GIB,
    training={"drafter weights, gradients, moments": 26 * GIB, "activations": 18 * GIB, "logits": GIB // 2},
)


def topology(*targets: str, drafters: tuple[str, ...], gpus: int = 8, machines: int = 1) -> Topology:
    config = TopologyConfig(targets=targets, drafters=drafters)
    return resolve_topology(config, accumulation=12, device="auto", gpus=gpus, machines=machines)


def parts(*targets: str, drafters: tuple[str, ...], queue: int = 2, machines: int = 1) -> dict[str, dict[str, int]]:
    return memory_by_device(topology(*targets, drafters=drafters, machines=machines), LOADS, queue)


def test_a_target_and_a_drafter_on_devices_of_their_own():
    found = parts("cuda:0", drafters=("cuda:1",))
    assert found["cuda:0"] == {
        "target weights": 54 * GIB,
        "target's own pass": GIB,
        "features": GIB // 4,
        "CUDA context": CONTEXT,
    }
    assert found["cuda:1"] == {
        **LOADS.training,
        "target's embedding and head": 5 * GIB,
        "features": GIB // 4 * (1 + 2 + 1),  # trained on, waiting, waiting to wait
        "CUDA context": CONTEXT,
    }


def test_colocated_neither_borrows_nor_queues():
    found = parts("cuda:0", drafters=("cuda:0",))
    assert list(found) == ["cuda:0"]
    assert found["cuda:0"] == {
        "target weights": 54 * GIB,
        "target's own pass": GIB,
        **LOADS.training,
        "features": GIB // 4,
        "CUDA context": CONTEXT,
    }
    both = parts("cuda:0", "cuda:1", drafters=("cuda:0",))
    assert both["cuda:0"]["features"] == 7 * GIB // 4  # of two replicas threads read ahead
    assert "target's embedding and head" not in both["cuda:0"]
    assert "target's embedding and head" in parts("cuda:1", "cuda:0", drafters=("cuda:0",))["cuda:0"]


def test_replicas_on_one_device_count_that_often_and_so_do_their_processes():
    found = parts("cuda:0", drafters=("cuda:1", "cuda:2", "cuda:3"))
    assert found["cuda:0"]["target weights"] == 3 * 54 * GIB
    assert found["cuda:0"]["CUDA context"] == 3 * CONTEXT
    assert found["cuda:1"] == found["cuda:3"]


def test_a_spread_replica_lies_in_equal_parts_and_its_features_on_the_last():
    found = parts("cuda:0+cuda:1", drafters=("cuda:1",))
    assert found["cuda:0"] == {"target weights": 27 * GIB, "target's own pass": GIB, "CUDA context": CONTEXT}
    assert found["cuda:1"]["target weights"] == 27 * GIB
    assert found["cuda:1"]["target's embedding and head"] == 5 * GIB  # the embedding lies on the other device


def test_the_queue_is_of_each_replica():
    one, two = parts("cuda:0", drafters=("cuda:2",), queue=4), parts("cuda:0", "cuda:1", drafters=("cuda:2",), queue=4)
    assert one["cuda:2"]["features"] == 6 * GIB // 4
    assert two["cuda:2"]["features"] == 11 * GIB // 4


def test_every_machine_is_the_first_and_the_cpu_is_one_device():
    assert parts("cuda:0", drafters=("cuda:1",), machines=3) == parts("cuda:0", drafters=("cuda:1",))
    found = memory_by_device(topology("cpu", "cpu", drafters=("cpu", "cpu"), gpus=0), LOADS, 2)
    assert list(found) == ["cpu"]
    assert found["cpu"]["target weights"] == 2 * 54 * GIB
    assert found["cpu"]["activations"] == 2 * 18 * GIB
    assert "CUDA context" not in found["cpu"]


@pytest.mark.parametrize(
    ("free", "expected"),
    [([140, 140], 1), ([80, 80], 1), ([40, 40], 2), ([40] * 8, 2), ([20] * 8, 3), ([6] * 4, 4), ([1] * 4, 1)],
)
def test_the_fewest_gpus_that_hold_a_target(free: list[int], expected: int):
    assert fewest_gpus(LOADS, [size * GIB for size in free]) == expected


def refused(
    device: str, targets: tuple[str, ...], drafters: tuple[str, ...], *, free: float, total: float = 0, gpus: int = 8
) -> str | None:
    chosen = topology(*targets, drafters=drafters, gpus=gpus)
    found = memory_by_device(chosen, LOADS, 2)[device]
    memory = DeviceMemory(device=device, parts=found, free=int(free * GIB), total=int((total or free) * GIB))
    return refusal(memory, chosen, gpus)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ("cuda:0", ("cuda:0",), ("cuda:1",), 40),
            'spread each replica over more GPUs, as topology.targets = "cuda:0+',
        ),
        (("cuda:0", ("cuda:0",), ("cuda:0",), 80), "put target and drafter on different GPUs (topology.drafters)"),
        (("cuda:0", ("cuda:0",), ("cuda:1", "cuda:2"), 80), "2 target replicas are on it: name more topology.targets"),
        (("cuda:1", ("cuda:0",), ("cuda:1",), 40), "lower drafter.layers"),
    ],
)
def test_what_cannot_fit_is_named_with_its_cure(arguments: tuple, says: str):
    device, targets, drafters, free = arguments
    told = refused(device, targets, drafters, free=free)
    assert told is not None
    assert told.startswith(f"{device} needs about ")
    assert f"GiB and has {free:.1f} GiB free" in told
    assert says in told
    assert "\n" not in told


def test_on_a_single_gpu_nothing_is_moved_to_another():
    told = refused("cuda:0", ("cuda:0",), ("cuda:0",), free=40, gpus=1)
    assert told is not None
    assert "take a larger GPU, or several" in told
    assert "spread" not in told


def test_what_others_hold_is_told_first():
    told = refused("cuda:0", ("cuda:0",), ("cuda:1",), free=40, total=80)
    assert told is not None
    assert "40.0 GiB of its 80.0 GiB are taken: end what runs there" in told
    assert "taken" not in str(refused("cuda:0", ("cuda:0",), ("cuda:1",), free=40, total=41))
    assert "end what runs" not in str(refused("cuda:0", ("cuda:0",), ("cuda:1",), free=20, total=40))  # would not help


def test_what_fits_or_is_not_known_is_not_refused():
    assert refused("cuda:0", ("cuda:0",), ("cuda:1",), free=80) is None
    unknown = DeviceMemory(device="cuda:0", parts={"target weights": 10**15}, free=None, total=None)
    assert refusal(unknown, topology("cuda:0", drafters=("cuda:1",)), 2) is None
