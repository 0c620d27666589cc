"""Threads that compile and tune at once, for real: the guard holds, and what it holds off can be provoked."""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from slipstream.compilation import stress, stress_cuda

# Cold rounds; those of the last three, which trace attention, take twice as long.
ROUNDS = {"compile": 100, "mixed": 100, "triton": 100, "triton-restore": 100, "masks": 40, "flex": 40, "selection": 40}
SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "stress_versions"


def played(*given: str, device: str = "cpu") -> tuple[int, list[dict[str, Any]], str]:
    parser = argparse.ArgumentParser()
    stress.add_arguments(parser)
    console = Console(file=io.StringIO(), width=150)
    code = stress.run(parser.parse_args([*given, "--device", device, "--json", "found.json"]), console)
    found = json.loads(Path("found.json").read_text(encoding="utf-8"))
    return code, found["rows"], console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize("workload", ROUNDS)
def test_cold_rounds_with_the_guard_are_clean(workload: str) -> None:
    if workload.startswith("triton"):
        pytest.importorskip("triton")
    code, (row,), text = played(
        *("--workload", workload, "--guard", "on", "--rounds", str(ROUNDS[workload]), "--threads", "3"),
        *("--seconds", "500"),
    )
    assert (code, row["rounds"], row["bad"]) == (0, ROUNDS[workload], 0), text


@pytest.mark.slow
@pytest.mark.parametrize("workload", ["triton", "triton-restore"])
def test_without_the_guard_the_tuner_fails_on_every_version(workload: str) -> None:
    pytest.importorskip("triton")
    code, (row,), text = played("--workload", workload, "--guard", "off", "--rounds", "20")
    assert code == 0, text
    assert row["bad"] > 0, text


def test_a_few_rounds_of_compiling_with_the_guard_are_clean() -> None:
    code, (row,), text = played("--workload", "mixed", "--guard", "on", "--rounds", "3", "--threads", "3")
    assert (code, row["rounds"], row["bad"]) == (0, 3, 0), text


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("workload", [kind.name for kind in stress_cuda.WORKLOADS])
def test_a_few_rounds_on_a_gpu_with_the_guard_are_clean(workload: str) -> None:
    if why := next(kind for kind in stress_cuda.WORKLOADS if kind.name == workload)().lacking():
        pytest.skip(why)
    code, (row,), text = played("--workload", workload, "--guard", "on", "--rounds", "2", device="cuda")
    assert (code, row["rounds"], row["bad"]) == (0, 2, 0), text


def test_the_script_for_other_versions_installs_what_is_missing_and_plays_there(tmp_path: Path) -> None:
    def versions(torch: str) -> subprocess.CompletedProcess[str]:
        python = tmp_path / "venvs" / f"torch-{torch}" / "bin" / "python"
        python.parent.mkdir(parents=True, exist_ok=True)
        ready = "0" if torch == "2.11.0" else "1"
        python.write_text(f'#!/bin/sh\necho "$@"\ncase "$1" in -c) exit {ready};; esac\n', encoding="utf-8")
        python.chmod(0o755)
        environment = {**os.environ, "STRESS_VENVS": str(tmp_path / "venvs"), "STRESS_VERSIONS": f"{torch}:3.6.0"}
        return subprocess.run(
            [SCRIPT, "--rounds", "7"], env=environment, capture_output=True, text=True, check=False, timeout=60
        )

    there = versions("2.11.0")
    assert there.returncode == 0, there.stderr
    assert "-m slipstream stress --device cpu --rounds 7" in there.stdout
    assert "pip install" not in there.stdout
    missing = versions("9.9.9")
    assert missing.returncode == 0, missing.stderr
    assert "torch==9.9.9 triton==3.6.0 rich" in missing.stdout
