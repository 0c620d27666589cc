"""What bites is said with its cure; what only slows or does not matter here is not."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from slipstream.compilation.doctor_judge import judge

GIB = 2**30


def place(name: str, **changes: Any) -> dict[str, Any]:
    return {
        "name": name,
        "path": f"/c/{name}",
        "variable": f"{name.upper()}_DIR",
        "exists": True,
        "files": 1,
        "bytes": 1,
        "complete": True,
        "writable": True,
        "why_not": "",
        "executable": True,
        "free_bytes": 50 * GIB,
        "total_bytes": 90 * GIB,
        "filesystem": 1,
        **changes,
    }


def facts() -> dict[str, Any]:
    """A CUDA machine on which everything is well."""
    return {
        "packages": {
            "torch": {"version": "2.13.0", "git_commit": "abc", "cuda": "13.0", "failed": ""},
            "triton": {"version": "3.7.1", "wanted": "3.7.1", "failed": ""},
            "flash-linear-attention": {"version": "0.6.0", "failed": ""},
            "fla-core": {"version": "0.6.0", "failed": ""},
            "transformers": {"version": "5.24.0", "failed": ""},
        },
        "driver": {"version": "580.1", "cuda": "13.0"},
        "gpus": [
            {"index": i, "name": "H200", "capability": "9.0", "memory_total": 9, "memory_free": 8, "failed": ""}
            for i in range(2)
        ],
        "peers": [[None, True], [True, None]],
        "no_gpu": "",
        "compile": {"compiled": True, "failed": ""},
        "hazards": [
            {
                "name": "fx-flag",
                "what": "a thread that traces makes every other raise",
                "package": "torch",
                "stock": "present",
                "stock_detail": "seen in this one",
                "installed": "handled",
                "installed_detail": "",
                "seen": "",
                "held": True,
            }
        ],
        "verify": {"held": True, "detail": ""},
        "environment": [],
        "compiler": {"command": "gcc", "path": "/usr/bin/gcc", "headers": "/usr/include/Python.h"},
        "caches": [place("inductor"), place("Triton")],
        "working_directory": place("working directory", path="/w", variable=""),
        "shared_memory": {"path": "/dev/shm", "total_bytes": 64 * GIB, "free_bytes": 60 * GIB},
    }


def changed(changes: dict[str, Any]) -> dict[str, Any]:
    found = copy.deepcopy(facts())
    for where, value in changes.items():
        *path, last = where.split("/")
        inner: Any = found
        for step in path:
            inner = inner[int(step) if step.isdigit() else step]
        inner[int(last) if last.isdigit() else last] = value
    return found


def test_a_machine_that_is_well() -> None:
    assert judge(facts()) == ([], [])


def test_a_machine_without_gpu_triton_and_fla_is_well() -> None:
    found = changed({
        "packages/torch/cuda": None,
        "packages/triton": {"version": None, "wanted": None, "failed": ""},
        "packages/flash-linear-attention": {"version": None, "failed": ""},
        "packages/fla-core": {"version": None, "failed": ""},
        "gpus": [],
        "peers": [],
        "driver": None,
        "compiler/path": None,
        "shared_memory": None,
    })  # fmt: skip
    assert judge(found)[0] == []


@pytest.mark.parametrize(
    ("changes", "says", "cure"),
    [
        ({"packages/torch/failed": "ImportError: x"}, "torch cannot be imported: ImportError: x", "reinstall"),
        ({"packages/torch/version": None}, "torch is not installed", "pip install"),
        ({"packages/transformers/version": None}, "transformers is not installed", "pip install"),
        ({"packages/triton/failed": "OSError: x"}, "triton cannot be imported: OSError: x", "triton==3.7.1"),
        ({"packages/triton/version": None}, "triton is not installed", "triton==3.7.1"),
        ({"packages/fla-core/failed": "ImportError: y"}, "fla-core cannot be imported", "uninstall"),
        ({"gpus": [], "no_gpu": "driver too old"}, "sees no GPU: driver too old", "13.0"),
        ({"gpus/1/failed": "out of memory"}, "GPU 1 (H200) cannot be used: out of memory", "CUDA_VISIBLE_DEVICES"),
        ({"compile/compiled": False}, "torch.compile compiles nothing", "TORCHDYNAMO_DISABLE"),
        ({"compile/failed": "RuntimeError: z"}, "torch.compile fails: RuntimeError: z", "Python"),
        (
            {"environment": [{"name": "A", "value": "1", "level": "bites", "effect": "is bad", "cure": "unset A"}]},
            "A=1: is bad",
            "unset A",
        ),
        ({"hazards/0/installed": "unknown", "hazards/0/held": False}, "fx-flag is not handled", "supported"),
        ({"hazards/0/seen": "it is stuck", "hazards/0/held": False}, "it is stuck", "patches"),
        ({"hazards/0/installed": "not known", "hazards/0/held": False}, "fx-flag", "--json"),
        ({"verify/held": False, "verify/detail": "no"}, "verify() does not hold: no", "patches"),
        ({"compiler/path": None}, "no C compiler", "gcc"),
        ({"compiler/headers": None}, "Python.h", "python3-dev"),
        ({"caches/0/writable": False, "caches/0/why_not": "full"}, "inductor cache /c/inductor: full", "INDUCTOR_DIR"),
        ({"caches/1/executable": False}, "noexec", "TRITON_DIR"),
        ({"caches/1/free_bytes": GIB, "caches/1/filesystem": 2}, "1.0 GiB free for the Triton cache", "TRITON_DIR"),
        ({"working_directory/writable": False, "working_directory/why_not": "x"}, "working directory /w: x", "cd"),
        ({"shared_memory/total_bytes": 64 * 2**20}, "64 MiB", "--shm-size"),
    ],
)
def test_what_bites_is_one_line_with_its_cure(changes: dict[str, Any], says: str, cure: str) -> None:
    problems, _ = judge(changed(changes))
    assert len(problems) == 1
    (problem,) = problems
    assert says in problem["what"]
    assert cure in problem["cure"]
    assert "\n" not in problem["what"] + problem["cure"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"packages/torch/cuda": None, "packages/triton/failed": "x", "gpus": []}, "triton cannot be imported"),
        ({"packages/triton/version": "3.9.0"}, "torch asks for triton 3.7.1, and 3.9.0 is installed"),
        ({"gpus": [], "driver": None, "no_gpu": ""}, "no NVIDIA driver"),
        ({"peers": [[None, False], [True, None]]}, "GPU 0 and GPU 1"),
        (
            {"environment": [{"name": "A", "value": "1", "level": "note", "effect": "is slow", "cure": "unset A"}]},
            "A=1",
        ),
    ],
)
def test_what_does_not_bite_is_a_note(changes: dict[str, Any], says: str) -> None:
    problems, notes = judge(changed(changes))
    assert problems == []
    assert len(notes) == 1
    assert says in notes[0]["what"]


def test_one_cause_is_told_once() -> None:
    off = {"name": "TORCHDYNAMO_DISABLE", "value": "1", "level": "bites", "effect": "e", "cure": "c"}
    assert len(judge(changed({"environment": [off], "compile/compiled": False}))[0]) == 1
    broken = changed({"packages/torch/failed": "no", "compile/failed": "no", "hazards/0/held": False,
                      "hazards/0/installed": "not known", "verify/held": False, "gpus": []})  # fmt: skip
    assert [p["what"] for p in judge(broken)[0]] == ["torch cannot be imported: no"]


def test_a_cache_that_cannot_be_written_is_told_once_whatever_disk_is_under_it() -> None:
    bad = place("inductor", writable=False, why_not="no", executable=False, free_bytes=0, filesystem=3)
    (problem,) = judge(changed({"caches/0": bad}))[0]
    assert problem["what"] == "the inductor cache /c/inductor: no"


def test_fla_that_fails_for_want_of_triton_is_not_told_again() -> None:
    found = changed({"packages/triton/failed": "no", "packages/fla-core/failed": "no"})
    found["hazards"] += [
        {**found["hazards"][0], "package": "fla", "installed": "not imported yet", "held": False},
        {**found["hazards"][0], "package": "triton", "installed": "not imported yet", "held": False},
    ]
    assert [p["what"] for p in judge(found)[0]] == ["triton cannot be imported: no"]


def test_places_on_one_full_disk_are_told_together() -> None:
    found = changed({"caches/0/free_bytes": GIB, "caches/1/free_bytes": GIB, "working_directory/free_bytes": GIB})
    (problem,) = judge(found)[0]
    assert "inductor cache" in problem["what"]
    assert "working directory" in problem["what"]
