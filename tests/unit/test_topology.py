"""Who owns what: every micro-batch once, in proportion, in a stable order; and every refusal with its cure."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest

from slipstream.config import Recipe, TopologyConfig
from slipstream.errors import ConfigError
from slipstream.recipe import load_recipe
from slipstream.topology import Replica, Topology, resolve_topology, shares


def gpus(first: int, count: int) -> tuple[str, ...]:
    return tuple(f"cuda:{n}" for n in range(first, first + count))


def resolve(
    targets: tuple[str, ...] = (),
    drafters: tuple[str, ...] = (),
    *,
    accumulation: int = 8,
    device: str = "auto",
    present: int = 8,
    machines: int = 1,
    span: int = 1,
) -> Topology:
    return resolve_topology(
        TopologyConfig(targets=targets, drafters=drafters),
        accumulation=accumulation,
        device=device,
        gpus=present,
        machines=machines,
        span=span,
    )


def named(topology: Topology) -> tuple[list[tuple[tuple[str, ...], ...]], list[str]]:
    """Return the replicas' devices of each rank, and each rank's device."""
    return [tuple(r.devices for r in rank.replicas) for rank in topology.ranks], [r.device for r in topology.ranks]


MANY = list(itertools.product((1, 2, 3, 5, 8), (1, 2, 3, 4), (1, 2, 3), (0, 1, 2, 5, 11)))


@pytest.mark.parametrize(("targets", "drafters", "machines", "more"), MANY)
def test_each_micro_batch_has_one_owner_and_shares_are_proportional(
    targets: int, drafters: int, machines: int, more: int
) -> None:
    ranks, accumulation = drafters * machines, drafters * machines + more
    given = {"accumulation": accumulation, "machines": machines, "present": 12}
    topology = resolve(gpus(0, targets), gpus(targets, drafters), **given)
    assert topology == resolve(gpus(0, targets), gpus(targets, drafters), **given)
    assert [r.rank for r in topology.ranks] == list(range(ranks))
    assert [(r.machine, r.local_rank) for r in topology.ranks] == [divmod(n, drafters) for n in range(ranks)]
    assert [j for r in topology.ranks for j in r.micro_batches] == list(range(accumulation))
    assert all(topology.rank_of(j).micro_batches.count(j) == 1 for j in range(accumulation))
    owned = [len(r.replicas) for r in topology.ranks]
    assert [replica.number for r in topology.ranks for replica in r.replicas] == list(range(sum(owned)))
    assert sum(owned) == max(targets, drafters) * machines
    assert max(owned) - min(owned) <= 1
    assert owned[:drafters] == sorted(owned[:drafters], reverse=True)
    for rank, count in zip(topology.ranks, owned, strict=True):
        share = len(rank.micro_batches)
        assert share >= 1
        assert abs(share - Fraction(accumulation * count, sum(owned))) < 1
    by_machine = [[rank.replicas for rank in topology.local(machine)] for machine in range(machines)]
    assert all(
        [[x.devices for x in r] for r in m] == [[x.devices for x in r] for r in by_machine[0]] for m in by_machine
    )


@pytest.mark.parametrize(
    ("accumulation", "expected"), [(3, [1, 1, 1]), (4, [2, 1, 1]), (5, [2, 2, 1]), (10, [4, 4, 2])]
)
def test_five_targets_and_three_drafters(accumulation: int, expected: list[int]) -> None:
    topology = resolve(gpus(0, 5), gpus(5, 3), accumulation=accumulation)
    assert [len(rank.replicas) for rank in topology.ranks] == [2, 2, 1]
    assert [len(rank.micro_batches) for rank in topology.ranks] == expected


def test_shares_are_by_largest_remainder_and_the_first_win_ties() -> None:
    assert shares(7, [1, 1, 1]) == [3, 2, 2]
    assert shares(10, [2, 2, 1]) == [4, 4, 2]
    assert shares(4, [2, 2, 1]) == [2, 1, 1]
    for counts in itertools.product((2, 3), repeat=4):  # a rank with fewer replicas never goes without
        assert min(shares(4, list(counts))) == 1


def test_one_target_and_three_drafters_have_a_replica_each_on_its_device() -> None:
    topology = resolve(("cuda:0",), gpus(1, 3))
    assert named(topology) == ([(("cuda:0",),)] * 3, ["cuda:1", "cuda:2", "cuda:3"])
    assert [rank.replicas[0].number for rank in topology.ranks] == [0, 1, 2]


def test_two_targets_and_five_drafters_are_spread_evenly_and_the_first_serves_more() -> None:
    owned, _ = named(resolve(gpus(0, 2), gpus(2, 5)))
    assert [replicas[0][0] for replicas in owned] == ["cuda:0", "cuda:0", "cuda:0", "cuda:1", "cuda:1"]


def test_the_order_of_the_lists_says_who_goes_with_whom() -> None:
    owned, devices = named(resolve(("cuda:3", "cuda:1+cuda:2"), ("cuda:1", "cuda:3")))
    assert owned == [(("cuda:3",),), (("cuda:1", "cuda:2"),)]
    assert devices == ["cuda:1", "cuda:3"]


def test_several_cpus_in_both_lists() -> None:
    owned, devices = named(resolve(("cpu", "cpu", "cpu"), ("cpu", "cpu"), present=0))
    assert owned == [(("cpu",), ("cpu",)), (("cpu",),)]
    assert devices == ["cpu", "cpu"]


@pytest.mark.parametrize(
    ("present", "device", "targets", "drafters", "why"),
    [
        (0, "auto", ("cpu",), ("cpu",), "no GPU"),
        (1, "auto", ("cuda:0",), ("cuda:0",), "one GPU"),
        (2, "auto", gpus(0, 1), gpus(1, 1), "chosen for 2 GPUs"),
        (3, "auto", gpus(0, 2), gpus(2, 1), "one more"),
        (4, "auto", gpus(0, 2), gpus(2, 2), "half"),
        (5, "auto", gpus(0, 3), gpus(3, 2), "one more"),
        (8, "auto", gpus(0, 4), gpus(4, 4), "half"),
        (8, "cpu", ("cpu",), ("cpu",), "run.device is cpu"),
        (8, "cuda:3", ("cuda:3",), ("cuda:3",), "run.device is cuda:3"),
        (8, "cuda", ("cuda:0",), ("cuda:0",), "run.device is cuda"),
    ],
)
def test_what_is_chosen_and_why(
    present: int, device: str, targets: tuple[str, ...], drafters: tuple[str, ...], why: str
) -> None:
    topology = resolve(present=present, device=device)
    owned, devices = named(topology)
    assert [name for replicas in owned for (name,) in replicas] == list(targets)
    assert devices == list(drafters)
    assert why in topology.why


@pytest.mark.parametrize(
    ("accumulation", "machines", "ranks", "unused"),
    [(1, 1, 1, "6 GPUs are not used"), (2, 1, 2, "4 GPUs"), (4, 2, 4, "4 GPUs"), (4, 1, 4, "")],
)
def test_no_more_ranks_are_chosen_than_there_are_micro_batches(
    accumulation: int, machines: int, ranks: int, unused: str
) -> None:
    topology = resolve(accumulation=accumulation, machines=machines)
    assert len(topology.ranks) == ranks
    assert unused in topology.why
    if unused:
        assert f"training.accumulation = {4 * machines}" in topology.why


@pytest.mark.parametrize(
    ("present", "span", "targets", "drafters"),
    [
        (2, 2, ["cuda:0+cuda:1"], ["cuda:1"]),
        (3, 2, ["cuda:0+cuda:1"], ["cuda:2"]),
        (5, 2, ["cuda:0+cuda:1", "cuda:2+cuda:3"], ["cuda:4"]),
        (6, 2, ["cuda:0+cuda:1", "cuda:2+cuda:3"], ["cuda:4", "cuda:5"]),
        (8, 4, ["cuda:0+cuda:1+cuda:2+cuda:3"], ["cuda:4"]),
    ],
)
def test_a_large_target_is_spread(present: int, span: int, targets: list[str], drafters: list[str]) -> None:
    topology = resolve(present=present, span=span)
    owned, devices = named(topology)
    assert ["+".join(r) for replicas in owned for r in replicas] == targets
    assert devices == drafters
    assert f"over {span} GPUs" in topology.why


@pytest.mark.parametrize(
    ("targets", "drafters", "present", "expected"),
    [
        (("cuda:0",), (), 4, (["cuda:0"] * 3, ["cuda:1", "cuda:2", "cuda:3"])),
        (("cuda:0",), (), 1, (["cuda:0"], ["cuda:0"])),
        (("cuda:0+cuda:1",), (), 2, (["cuda:0+cuda:1"], ["cuda:1"])),
        (("cuda:0", "cuda:1"), (), 2, (["cuda:0", "cuda:1"], ["cuda:0", "cuda:1"])),
        ((), ("cuda:0",), 4, (["cuda:1", "cuda:2", "cuda:3"], ["cuda:0"])),
        ((), ("cuda:0", "cuda:1"), 2, (["cuda:0", "cuda:1"], ["cuda:0", "cuda:1"])),
        (("cpu", "cpu"), (), 4, (["cpu", "cpu"], ["cpu"])),
        ((), ("cpu", "cpu"), 4, (["cpu", "cpu"], ["cpu", "cpu"])),
    ],
)
def test_one_list_is_chosen_to_go_with_the_other(
    targets: tuple[str, ...], drafters: tuple[str, ...], present: int, expected: tuple[list[str], list[str]]
) -> None:
    topology = resolve(targets, drafters, present=present)
    owned, devices = named(topology)
    assert (["+".join(r) for replicas in owned for r in replicas], devices) == expected
    assert "chosen" in topology.why


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"targets": ("",)}, "topology.targets holds an empty name; write"),
        ({"targets": ("cuda:0+",)}, "topology.targets holds 'cuda:0+'; write"),
        ({"drafters": (" ",)}, "topology.drafters holds an empty name"),
        ({"targets": ("cuda",)}, "topology.targets holds 'cuda', which names no GPU; write cuda:0"),
        ({"drafters": ("cuda",)}, "topology.drafters holds 'cuda', which names no GPU"),
        ({"targets": ("gpu:0",)}, "topology.targets holds 'gpu:0'; write cuda:N"),
        ({"drafters": ("cuda:x",)}, "topology.drafters holds 'cuda:x'; write cuda:N or cpu"),
        ({"drafters": ("cuda:01",)}, "topology.drafters holds 'cuda:01'"),
        ({"targets": ("cuda:8",)}, "topology.targets holds cuda:8, but there are 8 GPUs, counted from 0"),
        ({"drafters": ("cuda:1",), "present": 1}, "topology.drafters holds cuda:1, but there is 1 GPU, counted from 0"),
        ({"targets": ("cuda:0",), "present": 0}, "topology.targets holds cuda:0, but no GPU is seen; write cpu"),
        ({"targets": ("cuda:0+cuda:0",)}, "cuda:0+cuda:0 in topology.targets names cuda:0 twice"),
        ({"targets": ("cpu+cuda:0",)}, "cpu+cuda:0 in topology.targets mixes cpu and cuda"),
        ({"targets": ("cuda:0", "cpu")}, "topology.targets mixes cpu and cuda"),
        ({"drafters": ("cuda:0", "cpu")}, "topology.drafters mixes cpu and cuda"),
        ({"targets": ("cpu",), "drafters": ("cuda:0",)}, "topology.targets is on cpu and topology.drafters on cuda"),
        ({"drafters": ("cuda:0", "cuda:1", "cuda:0")}, "topology.drafters names cuda:0 twice"),
        ({"drafters": ("cuda:0+cuda:1",)}, "topology.drafters holds cuda:0+cuda:1, but a rank has one device"),
        ({"targets": ("cuda:0",), "device": "cpu"}, "run.device is cpu, but topology names cuda devices"),
        ({"targets": ("cpu",), "device": "cuda"}, "run.device is cuda, but topology names cpu"),
        ({"drafters": ("cuda:0",), "device": "cuda:1"}, "run.device is cuda:1, but topology.drafters is cuda:0"),
        ({"targets": ("cuda:0",), "device": "cuda:1"}, "run.device is cuda:1, but topology.drafters is empty"),
        ({"device": "cuda:9"}, "run.device is cuda:9, but there are 8 GPUs"),
        ({"device": "cuda", "present": 0}, "run.device is cuda, but no GPU is seen"),
        ({"device": "gpu"}, "run.device is 'gpu'; use auto, cpu, cuda or cuda:N"),
        (
            {"drafters": gpus(0, 3), "accumulation": 2},
            "training.accumulation is 2, but each of 3 ranks needs a micro-batch of every step; set it to 3 or more",
        ),
        (
            {"drafters": gpus(0, 3), "accumulation": 5, "machines": 2},
            "each of 6 ranks (3 on each of 2 machines) needs a micro-batch of every step; set it to 6 or more",
        ),
        ({"accumulation": 1, "machines": 2}, "each of 2 ranks (1 on each of 2 machines)"),
        ({"machines": 0}, "machines is 0; give 1 or more"),
    ],
)
def test_a_mistake_is_one_line_with_the_cure(arguments: dict, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(**arguments)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_smallest_accumulation_that_is_named_works() -> None:
    for targets, drafters in itertools.product(range(1, 9), range(1, 5)):
        lists = (gpus(0, targets), gpus(0, drafters))
        assert len(resolve(*lists, accumulation=drafters).ranks) == drafters
        if drafters > 1:
            with pytest.raises(ConfigError, match=f"set it to {drafters} or more"):
                resolve(*lists, accumulation=drafters - 1)


def test_the_setting_is_read_from_file_and_command_line(tmp_path) -> None:
    path = tmp_path / "r.toml"
    path.write_text('[topology]\ntargets = ["cuda:0"]\nqueue = 3\n', encoding="utf-8")
    assert load_recipe(path).topology == TopologyConfig(targets=("cuda:0",), queue=3)
    given = load_recipe(path, ["--topology.targets", "cuda:0", "cuda:1+cuda:2", "--topology.lockstep", "true"])
    assert given.topology == TopologyConfig(targets=("cuda:0", "cuda:1+cuda:2"), queue=3, lockstep=True)
    assert Recipe().topology == TopologyConfig()
    with pytest.raises(ConfigError, match=r"Did you mean topology\.drafters\?"):
        load_recipe(path, ["--topology.drafter", "cuda:0"])
    with pytest.raises(ConfigError, match=r"topology\.queue is 0; it must be at least 1"):
        load_recipe(path, ["--topology.queue", "0"])


def test_a_topology_is_plain_data() -> None:
    topology = resolve(("cuda:0+cuda:1",), ("cuda:2",), accumulation=2)
    (rank,) = topology.ranks
    assert rank.replicas == (Replica(number=0, devices=("cuda:0", "cuda:1")),)
    assert (rank.rank, rank.local_rank, rank.machine, rank.device, rank.micro_batches) == (0, 0, 0, "cuda:2", (0, 1))
    assert topology.accumulation == 2
    assert topology.kind == "cuda"
    assert topology.devices == ("cuda:0", "cuda:1", "cuda:2")
    assert hash(topology) == hash(resolve(("cuda:0+cuda:1",), ("cuda:2",), accumulation=2))


def test_a_run_may_be_resumed_with_another(tmp_path) -> None:
    from slipstream.training.session import prepare
    from support.tiny_run import make_inputs, tiny_recipe

    make_inputs(tmp_path)
    one = tiny_recipe(tmp_path, tmp_path / "run", training__accumulation=2)
    two = tiny_recipe(tmp_path, tmp_path / "run", training__accumulation=2, topology__drafters="cpu", topology__queue=5)
    assert one.topology != two.topology
    assert prepare(one, say=lambda line: None).identity == prepare(two, say=lambda line: None).identity
