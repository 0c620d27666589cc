"""Threads that compile and tune at once, for real: the guard holds, and what it holds off can be provoked."""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from slipstream.compilation import stress, stress_cuda

# Cold rounds; those of the last three, which trace attention, take twice as long.
ROUNDS = {"compile": 100, "mixed": 100, "triton": 100, "triton-restore": 100, "masks": 40, "flex": 40, "selection": 40}
SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


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


# A release's python that only tells what it is asked; it is complete once fla-core was "installed", except torch 9.9.9.
PYTHON = """#!/bin/sh
here=$(dirname "$0")/..
case "$*" in "-m pip --version") [ ! -f "$here/cut-short" ]; exit ;; esac
echo "asked: $*"
case "$*" in
  *slipstream*stress*--json*) while [ "$1" != --json ]; do shift; done; echo "$FOUND" > "$2" ;;
  *slipstream*stress*) exit $(cat "$here/code" 2>/dev/null || echo 0) ;;
  -c*) [ -f "$here/filled" ] ;;
  *9.9.9*) exit 1 ;;
  *fla-core*) touch "$here/filled" ;;
  *stress_verdict*) exec "$REAL" "$@" ;;
esac
"""

# The interpreter that makes environments: `-m venv --clear DIRECTORY`, which leaves the python that was put there.
MAKER = """#!/bin/sh
echo "made: $*"
[ "$1 $2 $3" = "-m venv --clear" ] && rm -f "$4/cut-short"
"""


def found(bad: dict[str, int], *, torch: str = "2.11.0+cu130", guarded_bad: int = 0, rounds: int = 30) -> str:
    """Return what the command writes of four workloads, of which ``bad`` rounds failed without the guard."""
    rows = []
    for name in ("compile", "mixed", "triton", "triton-restore"):
        rows.append({"workload": name, "guard": True, "rounds": rounds, "bad": guarded_bad})
        rows.append({"workload": name, "guard": False, "rounds": rounds, "bad": bad.get(name, 0)})
    return json.dumps({"versions": {"torch": torch, "triton": "3.6.0"}, "rows": rows})


ALL_FAIL = {"compile": 30, "mixed": 29, "triton": 30, "triton-restore": 30}


def versions(
    room: Path, release: str, *arguments: str, text: str = found(ALL_FAIL)
) -> subprocess.CompletedProcess[str]:
    """Run the script for a release whose environment holds a python that does nothing."""
    for one in release.split():
        venv = room / "installed" if one == "installed" else room / "venvs" / f"torch-{one.split(':')[0]}"
        python = venv / "bin" / "python"
        python.parent.mkdir(parents=True, exist_ok=True)
        python.write_text(PYTHON, encoding="utf-8")
        python.chmod(0o755)
    maker = room / "maker"
    maker.write_text(MAKER, encoding="utf-8")
    maker.chmod(0o755)
    environment = {
        **os.environ,
        "VENV": str(room / "installed"),
        "STRESS_VENVS": str(room / "venvs"),
        "STRESS_VERSIONS": release,
        "STRESS_PAUSE": "0",
        "REAL": sys.executable,
        "PYTHON": str(room / "maker"),
        "FOUND": text,
    }
    return subprocess.run(
        [SCRIPTS / "stress_versions", *arguments],
        env=environment, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip


def test_the_script_for_other_versions_installs_what_is_missing_and_plays_there(tmp_path: Path) -> None:
    first = versions(tmp_path, "2.11.0:3.6.0")
    assert first.returncode == 0, first.stdout + first.stderr
    assert "torch==2.11.0 triton==3.6.0 rich" in first.stdout
    assert "test_safety.py" in first.stdout
    assert "-m slipstream stress --device cpu --rounds 20 --threads 3" in first.stdout
    assert "bad rounds: 0 of 120 guarded, 119 of 120 not" in first.stdout
    second = versions(tmp_path, "2.11.0:3.6.0", "--rounds", "7")
    assert second.returncode == 0, second.stdout + second.stderr
    assert "pip install" not in second.stdout
    assert "stress --device cpu --rounds 7\n" in second.stdout


def test_what_the_venv_holds_is_played_without_its_unit_tests(tmp_path: Path) -> None:
    done = versions(tmp_path, "installed")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "-m slipstream stress --device cpu --rounds 20 --threads 3" in done.stdout
    assert "pip install" not in done.stdout
    assert "test_safety.py" not in done.stdout


def test_a_release_that_cannot_be_installed_is_tried_again_and_told(tmp_path: Path) -> None:
    done = versions(tmp_path, "9.9.9:3.6.0")
    assert done.returncode == 1
    assert done.stdout.count("torch==9.9.9 triton==3.6.0") == 3
    assert "could not be installed" in done.stderr
    assert "slipstream stress" not in done.stdout
    both = versions(tmp_path, "9.9.9:3.6.0 installed")
    assert both.returncode == 1
    assert "slipstream stress" in both.stdout  # the other one is played all the same


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (found({}), "compile: no round failed without the guard"),
        (found({**ALL_FAIL, "mixed": 0}), "mixed: no round failed without the guard"),
        (found({"triton-restore": 30}, torch="2.99.0"), "triton: no round failed without the guard"),
        (found(ALL_FAIL, guarded_bad=1), "triton: 1 guarded rounds are bad"),
        (found(ALL_FAIL, rounds=24), "96 guarded rounds were played, fewer than 100"),
        (found(ALL_FAIL, rounds=0), "triton: no guarded round was played"),
        (found(ALL_FAIL, torch="2.13.0"), "masks: no round failed without the guard"),
    ],
)
def test_rounds_that_prove_nothing_fail_the_script(tmp_path: Path, text: str, says: str) -> None:
    done = versions(tmp_path, "installed", text=text)
    assert done.returncode == 1, done.stdout
    assert says in done.stderr


def test_an_environment_that_was_cut_short_is_made_again(tmp_path: Path) -> None:
    venv = tmp_path / "venvs" / "torch-2.11.0"
    venv.mkdir(parents=True)
    (venv / "cut-short").touch()  # a python without pip
    done = versions(tmp_path, "2.11.0:3.6.0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("made: ") == 1
    assert f"made: -m venv --clear {venv}" in done.stdout
    assert "try 2" not in done.stdout


def test_the_exit_code_is_the_highest_and_not_the_last(tmp_path: Path) -> None:
    for release, code in (("torch-2.11.0", 2), ("torch-2.12.0", 1)):
        venv = tmp_path / "venvs" / release
        venv.mkdir(parents=True)
        (venv / "code").write_text(str(code), encoding="utf-8")
    for releases in ("2.11.0:3.6.0 2.12.0:3.6.0 installed", "installed 2.12.0:3.6.0 2.11.0:3.6.0"):
        done = versions(tmp_path, releases, "--rounds", "7")
        assert done.returncode == 2, done.stdout + done.stderr
        assert done.stdout.count("stress --device cpu --rounds 7\n") == 3


@pytest.mark.parametrize(
    "release", ["2.11:3.6.0", "2.11.0", "2.11.0:", "2.11.0:3.6.0,installed", "Installed", "../x", "*"]
)
def test_what_is_no_release_is_refused_before_any_is_played(tmp_path: Path, release: str) -> None:
    assert f"'{release}'" in refused(tmp_path, f"installed {release}")


def test_no_release_at_all_is_refused(tmp_path: Path) -> None:
    assert "STRESS_VERSIONS has ''" in refused(tmp_path, " \n ")


def refused(room: Path, releases: str) -> str:
    settings = {"STRESS_PAUSE": "0", "STRESS_VENVS": str(room / "venvs"), "STRESS_VERSIONS": releases}
    missing = dict.fromkeys(("PYTHON", "VENV"), "/nonexistent")  # one that were played would install nothing
    done = subprocess.run(
        [SCRIPTS / "stress_versions"],
        env={**os.environ, **settings, **missing},
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert not (room / "venvs").exists()
    (line,) = done.stderr.splitlines()
    return line
