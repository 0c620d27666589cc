"""The tables: everything found is there, and no text of it is read as markup."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from slipstream.compilation.doctor_view import show, size


def found(**changes: Any) -> dict[str, Any]:
    place = {
        "name": "inductor", "path": "/c/[red]x", "variable": "V", "exists": True, "files": 3, "bytes": 2048,
        "complete": False, "writable": False, "why_not": "it is [bold]full[/]", "free_bytes": 3 * 2**30,
    }  # fmt: skip
    hazard = {
        "name": "fx-flag", "what": "what goes wrong", "stock": "present", "stock_detail": "seen [here]",
        "installed": "handled", "installed_detail": "", "seen": "", "held": True,
    }  # fmt: skip
    gpu = {"name": "NVIDIA H200", "capability": "9.0", "memory_total": 141 * 2**30, "memory_free": None, "failed": ""}
    return {
        "slipstream": "0.1.0",
        "python": {"version": "3.11.7", "executable": "/bin/python"},
        "packages": {
            "torch": {"version": "2.13.0", "git_commit": "abc123", "cuda": "13.0", "failed": ""},
            "triton": {"version": "3.7.1", "wanted": "3.7.1", "failed": "OSError: [no]"},
            "fla-core": {"version": None, "failed": ""},
        },
        "driver": {"version": "580.1", "cuda": "13.0"},
        "gpus": [{**gpu, "index": 0}, {**gpu, "index": 1}],
        "peers": [[None, True], [False, None]],
        "hazards": [hazard, {**hazard, "name": "other", "installed": "not known", "held": False, "stock_detail": ""}],
        "environment": [
            {"name": "TRITON_INTERPRET", "value": "1", "level": "bites", "effect": "interpreted"},
            {"name": "NOT_SET", "value": None, "level": "", "effect": ""},
        ],
        "compiler": {"path": "/usr/bin/gcc", "headers": None},
        "caches": [place],
        "working_directory": {**place, "variable": "", "writable": True, "why_not": "", "name": "working directory"},
        "shared_memory": {"path": "/dev/shm", "total_bytes": 64 * 2**20, "free_bytes": 2**20},
        "problems": [{"what": "[x] is wrong", "cure": "mend [y]"}],
        "notes": [{"what": "a note", "cure": "a cure"}],
        "ok": False,
        **changes,
    }


def shown(facts: dict[str, Any]) -> str:
    stream = io.StringIO()
    show(facts, Console(file=stream, width=200, highlight=False))
    return stream.getvalue()


def test_everything_is_shown_as_it_is() -> None:
    text = shown(found())
    for part in (
        "git abc123, CUDA 13.0", "OSError: [no]", "580.1", "runs CUDA up to 13.0", "without Python.h",
        "NVIDIA H200", "9.0", "141.0 GiB", "provoked here", "handled, verified", "seen [here]", "not known",
        "what goes wrong", "TRITON_INTERPRET", "interpreted", "/c/[red]x", "it is [bold]full[/]", "more than 3",
        "more than 2.0 KiB", "3.0 GiB", "/dev/shm", "64.0 MiB", "[x] is wrong", "-> mend [y]", "a note", "-> a cure",
    ):  # fmt: skip
        assert part in text, part
    assert "NOT_SET" not in text
    assert "Nothing here will bite" not in text


def test_a_machine_without_gpus_on_which_all_is_well() -> None:
    text = shown(found(gpus=[], peers=[], driver=None, environment=[], shared_memory=None, problems=[], ok=True))
    assert "GPUs" not in text
    assert "Environment" not in text
    assert "Nothing here will bite." in text


@pytest.mark.parametrize(("value", "text"), [(None, "?"), (0, "0 B"), (1536, "1.5 KiB"), (2**31, "2.0 GiB")])
def test_sizes(value: int | None, text: str) -> None:
    assert size(value) == text
