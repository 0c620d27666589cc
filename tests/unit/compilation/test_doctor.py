"""``slipstream doctor`` from end to end: a table for people, one object for machines, and the exit code."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SOURCE = Path(__file__).resolve().parents[3] / "src"
KEYS = (
    "schema", "slipstream", "ok", "problems", "notes", "python", "packages", "driver", "gpus", "peers", "no_gpu",
    "compile", "hazards", "verify", "environment", "compiler", "caches", "working_directory", "shared_memory",
)  # fmt: skip


def doctor(directory: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    quiet = {k: v for k, v in os.environ.items() if not k.startswith(("TORCH", "TRITON", "FLA"))}
    return subprocess.run(
        [sys.executable, "-m", "slipstream", "doctor", *arguments],
        env={**quiet, "PYTHONPATH": f"{directory}:{SOURCE}", "COLUMNS": "160", **environment},
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def fake(directory: Path, package: str, code: str) -> None:
    (directory / package).mkdir()
    (directory / package / "__init__.py").write_text(code, encoding="utf-8")


def but_this_machines(found: dict[str, Any]) -> list[dict[str, str]]:
    """Return the problems without those that the machine of the test may have of its own."""
    return [p for p in found["problems"] if not re.search(" GiB free for | is not installed", p["what"])]


@pytest.mark.slow
def test_one_object_with_stable_keys(tmp_path: Path) -> None:
    done = doctor(tmp_path, "--json", SLIPSTREAM_CACHE=str(tmp_path / "cache"))
    found = json.loads(done.stdout)
    assert done.stderr == ""
    assert tuple(found) == KEYS
    assert found["ok"] is (not found["problems"]) is (done.returncode == 0)
    assert all(hazard["held"] for hazard in found["hazards"])
    assert found["verify"] == {"held": True, "detail": ""}
    assert {c["name"]: c["path"] for c in found["caches"]}["Slipstream"] == str(tmp_path / "cache")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_compilation_switched_off_bites(tmp_path: Path) -> None:
    done = doctor(tmp_path, TORCH_COMPILE_DISABLE="1")
    assert done.returncode == 1
    assert "TORCH_COMPILE_DISABLE=1: compilation is switched off" in done.stdout
    assert "unset TORCH_COMPILE_DISABLE" in done.stdout
    assert "fx-modules" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.slow
def test_caches_that_cannot_be_used_are_the_only_causes_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")
    bad = {
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "file"),
        "TRITON_CACHE_DIR": "/proc/x",
        "SLIPSTREAM_CACHE": str(tmp_path / "file" / "deeper"),
    }
    done = doctor(tmp_path, "--json", **bad)
    found = json.loads(done.stdout)
    assert done.returncode == 1
    told = but_this_machines(found)
    assert [p["cure"] for p in told] == [f"set {name} to a directory that can be written" for name in bad]
    for problem, path in zip(told, bad.values(), strict=True):
        assert path in problem["what"]
    assert found["compile"] == {"compiled": True, "failed": ""}
    assert all(hazard["held"] for hazard in found["hazards"])
    assert found["verify"] == {"held": True, "detail": ""}


@pytest.mark.slow
def test_a_working_directory_that_was_removed_is_the_only_cause_named(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    leave = f"import os, sys; os.rmdir({str(gone)!r}); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    done = subprocess.run(
        [sys.executable, "-c", leave, "-m", "slipstream", "doctor", "--json"],
        env={**os.environ, "PYTHONPATH": str(SOURCE), "TORCHINDUCTOR_CACHE_DIR": "relative"},
        cwd=gone,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stderr == ""
    assert done.returncode == 1
    found = json.loads(done.stdout)
    (problem,) = but_this_machines(found)
    assert problem["what"] == f"the working directory {gone}: it has been removed since this shell went there"
    assert problem["cure"].startswith("cd to")
    assert all(hazard["held"] for hazard in found["hazards"])


def test_a_broken_torch_is_reported_without_a_traceback(tmp_path: Path) -> None:
    fake(tmp_path, "torch", "raise ImportError('libtorch [bold] is not there')")
    done = doctor(tmp_path)
    assert done.returncode == 1
    assert "torch cannot be imported: ImportError: libtorch [bold] is not there" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    found = json.loads(doctor(tmp_path, "--json").stdout)
    assert tuple(found) == KEYS
    assert found["ok"] is False


def test_a_reader_that_has_seen_enough_gets_no_traceback(tmp_path: Path) -> None:
    fake(tmp_path, "torch", "raise ImportError('no')")
    done = subprocess.run(
        f"{sys.executable} -m slipstream doctor --json | true",
        shell=True,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{SOURCE}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stderr == ""
