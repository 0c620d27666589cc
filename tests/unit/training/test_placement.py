"""The plan of a topology: what is chosen from the GPUs present, what is claimed of them, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from slipstream.config import Recipe
from slipstream.errors import ConfigError, DrafterError, TargetError
from slipstream.training import memory
from slipstream.training.memory import GIB
from slipstream.training.placement import Placement, measure, place
from support.shapes import save_shape
from support.tiny import save_tiny_target
from support.tiny_run import tiny_recipe


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("placement")
    save_tiny_target(where / "target")
    save_shape(where / "large", "qwen3-8b")
    return where


def recipe(root: Path, **changes: object) -> Recipe:
    return tiny_recipe(root, root / "run", **changes)


def large(root: Path, **changes: object) -> Recipe:
    given = {
        "target__path": root / "large",
        "target__dtype": "bfloat16",
        "data__row_length": 3072,
        "drafter__layers": 5,
        "training__anchors": 512,
        "training__precision": "bfloat16",
    }
    return recipe(root, **{**given, **changes})


def replicas(found: Placement) -> list[str]:
    return ["+".join(replica.devices) for rank in found.topology.ranks for replica in rank.replicas]


def present(monkeypatch: pytest.MonkeyPatch, *free: float, total: float = 80) -> None:
    """Let torch see GPUs with so many GiB free."""

    def mem_get_info(device: str) -> tuple[int, int]:
        return int(free[int(device.partition(":")[2])] * GIB), int(total * GIB)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(free))
    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


def test_the_cpu_is_planned_without_a_claim(root: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = place(recipe(root))
    assert found.topology.devices == ("cpu",)
    assert [(m.free, m.total) for m in found.memory] == [(None, None)]
    assert "dense attention" in found.memory[0].parts
    assert found.refusals == ()
    assert "note: what is free on the cpu is not looked at" in found.notes


def test_neither_data_nor_weights_are_needed(root: Path):
    assert not (root / "train.jsonl").exists()
    assert place(recipe(root), gpus=2).refusals == ()
    assert (root / "large" / "model.safetensors").stat().st_size == 0
    assert place(large(root), gpus=1, gpu_bytes=80 * GIB).refusals == ()


def test_what_is_free_is_asked_of_the_gpus_that_are_here(root: Path, monkeypatch: pytest.MonkeyPatch):
    present(monkeypatch, 79, 78.5)
    found = place(large(root))
    assert [(m.device, m.free) for m in found.memory] == [("cuda:0", 79 * GIB), ("cuda:1", int(78.5 * GIB))]
    assert all(m.total == 80 * GIB for m in found.memory)
    assert found.notes == ()


def test_a_busy_gpu_is_refused_by_name(root: Path, monkeypatch: pytest.MonkeyPatch):
    present(monkeypatch, 79, 20)
    found = place(large(root, topology__targets="cuda:0", topology__drafters="cuda:1"))
    (told,) = found.refusals
    assert told.startswith("cuda:1 needs about ")
    assert "60.0 GiB of its 80.0 GiB are taken: end what runs there" in told


def test_of_gpus_elsewhere_only_what_is_given_is_claimed(root: Path, monkeypatch: pytest.MonkeyPatch):
    present(monkeypatch, 1, 1)
    unknown = place(large(root), gpus=4)
    assert [m.free for m in unknown.memory] == [None] * 2
    assert unknown.refusals == ()
    assert "give --gpu-memory GIB" in unknown.notes[0]
    given = place(large(root, training__accumulation=2), gpus=4, gpu_bytes=80 * GIB)
    assert [m.free for m in given.memory] == [80 * GIB] * 4
    assert "--gpu-memory" not in given.notes[0]
    here = place(large(root), gpu_bytes=80 * GIB)  # as many as there are, of another size
    assert here.topology.devices == ("cuda:0", "cuda:1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"no GPU|none is seen here; give --gpus N"):
        place(large(root), gpu_bytes=80 * GIB)


@pytest.mark.parametrize(
    ("gpus", "size", "expected"),
    [(2, 80, ["cuda:0"]), (3, 14, ["cuda:0+cuda:1"]), (2, 14, ["cuda:0+cuda:1"]), (1, 14, ["cuda:0"])],
)
def test_a_target_is_spread_over_the_fewest_gpus_that_hold_it(root: Path, gpus: int, size: int, expected: list[str]):
    assert replicas(place(large(root), gpus=gpus, gpu_bytes=size * GIB)) == expected


def test_a_replica_that_is_named_is_not_spread(root: Path):
    found = place(large(root, topology__targets="cuda:0", topology__drafters="cuda:1"), gpus=4, gpu_bytes=14 * GIB)
    assert replicas(found) == ["cuda:0"]
    assert len(found.refusals) == 2
    assert 'topology.targets = "cuda:0+cuda:1"' in found.refusals[0]


def test_little_room_is_told(root: Path):
    need = place(large(root), gpus=1).memory[0].need
    found = place(large(root), gpus=1, gpu_bytes=need + 1)
    assert found.refusals == ()
    assert any(note.startswith("warning: cuda:0 will be 100% full") for note in found.notes)
    assert place(large(root), gpus=1, gpu_bytes=need - 1).refusals


def test_sizes_follow_the_settings(root: Path):
    base = measure(large(root), "cuda", here=False)
    assert base.target == 2 * 8_190_735_360  # as its card says: 8.2 billion
    assert base.features == 3072 * 5 * 4096 * 2
    assert base.borrowed == 2 * 151936 * 4096 * 2
    assert set(base.training) <= set(memory._CURES)
    assert measure(large(root, training__labels="soft"), "cuda", here=False).features == base.features * 6 / 5
    assert measure(large(root, target__dtype="float32"), "cuda", here=False).target == 2 * base.target
    auto = large(root, target__dtype="auto", training__precision="auto")
    assert measure(auto, "cuda", here=False) == base  # GPUs that are not here are taken to multiply bfloat16
    dense = measure(large(root, training__attention="dense"), "cuda", here=False)
    assert set(dense.training) <= set(memory._CURES)
    small = recipe(root, topology__queue=7)
    assert place(small, gpus=2).memory[1].parts["features"] == 9 * measure(small, "cuda", here=False).features


def test_it_can_be_written_as_json(root: Path):
    found = place(recipe(root, training__accumulation=3), gpus=3, machines=2, gpu_bytes=80 * GIB).as_json()
    assert (found["machines"], found["micro_batches"], found["refusals"]) == (2, 3, [])
    assert [rank["micro_batches"] for rank in found["ranks"]] == [(0, 1), (2,)]
    assert found["ranks"][1]["replicas"] == (
        {"number": 2, "devices": ("cuda:0",)},
        {"number": 3, "devices": ("cuda:1",)},
    )
    assert [m["device"] for m in found["memory"]] == ["cuda:0", "cuda:1", "cuda:2"]
    assert all(m["need"] == sum(m["parts"].values()) for m in found["memory"])


def test_as_text_every_rank_has_its_line_and_devices_that_are_alike_share_theirs(root: Path):
    settings = {"training__accumulation": 5, "topology__lockstep": "true"}
    lines = list(place(recipe(root, **settings), gpus=5, machines=1, gpu_bytes=80 * GIB).lines())
    assert lines[0].startswith("1 machine, 2 ranks, 3 target replicas; a step is 5 micro-batches of 1 row; 2 may wait")
    assert lines[0].endswith("lockstep: a rank's replicas run one after another")
    assert lines[1].startswith("devices: chosen for 5 GPUs")
    assert "0        0     cuda:3   3: 0 to 2      0 on cuda:0, 1 on cuda:1" in lines
    assert "0        1     cuda:4   2: 3 to 4      2 on cuda:2" in lines
    assert any(line.startswith("cuda:0, cuda:1, cuda:2: ") and line.endswith("80.00 GiB free") for line in lines)


def test_what_training_would_refuse_is_refused(root: Path):
    with pytest.raises(TargetError):
        place(recipe(root, target__path=root / "nowhere"), gpus=1)
    with pytest.raises((DrafterError, TargetError), match="9"):
        place(recipe(root, drafter__target_layer_ids=9), gpus=1)
    with pytest.raises(ConfigError, match=r"there are 2 GPUs"):
        place(recipe(root, topology__targets="cuda:5"), gpus=2)
