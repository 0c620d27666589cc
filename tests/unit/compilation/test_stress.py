from __future__ import annotations

import argparse
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from rich.console import Console

from slipstream.cli import main
from slipstream.compilation import stress, stress_cpu
from slipstream.compilation.stress_parent import signals_interrupt
from slipstream.compilation.stress_plan import Round, Row
from slipstream.compilation.stress_table import table
from slipstream.errors import CompilationError

VERSIONS = {"torch": "2.x", "triton": "3.x"}


def arguments(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    stress.add_arguments(parser)
    return parser.parse_args(list(given))


def run(monkeypatch: pytest.MonkeyPatch, rounds, *given: str, note: str = "") -> tuple[int, str, list]:
    batches = []

    def play(batch, on_round):
        batches.append(batch)
        played = rounds(batch)
        for found in played:
            on_round(found)
        return Row(batch.name, batch.guard, 1, tuple(played), (), note, VERSIONS)

    monkeypatch.setattr(stress, "play_batch", play)
    console = Console(file=io.StringIO(), width=150)
    code = stress.run(arguments(*given), console)
    return code, console.file.getvalue(), batches


def clean(batch):
    return [Round(i, 0.5, benches=4, tuned=4) for i in range(batch.rounds)]


def bad_without_guard(batch):
    return clean(batch) if batch.guard else [Round(0, 0.5, errors=("RuntimeError: FX", "ValueError: other"))]


def test_failures_without_the_guard_do_not_count(monkeypatch):
    code, text, batches = run(monkeypatch, bad_without_guard, "--device", "cpu", "--rounds", "3", "--workload", "mixed")
    assert code == 0
    assert [(b.name, b.guard, b.rounds) for b in batches] == [("mixed", True, 3), ("mixed", False, 3)]
    assert "RuntimeError: FX" in text
    assert "torch 2.x" in text


def test_a_guarded_round_that_is_not_clean_is_the_exit_code(monkeypatch):
    for found in (
        Round(0, 1.0, errors=("E: e",)),
        Round(0, 1.0, dense=1),
        Round(0, 1.0, wrong=("w",)),
        Round(0, 1.0, hang=True),
    ):
        code, text, _ = run(monkeypatch, lambda _, found=found: [found], "--device", "cpu", "--guard", "on")
        assert code == 1
        assert "not clean" in text


def test_no_guarded_round_is_not_clean_either(monkeypatch):
    assert run(monkeypatch, lambda _: [], "--device", "cpu", "--workload", "mixed", "--guard", "on")[0] == 1


def test_without_the_guard_only_nothing_can_be_bad(monkeypatch):
    code, _, batches = run(monkeypatch, bad_without_guard, "--device", "cpu", "--guard", "off")
    assert code == 0
    assert not any(b.guard for b in batches)


def test_one_table_with_every_figure(monkeypatch):
    rounds = [
        Round(
            0, 1.0, errors=("E: one", "E: one"), dense=3, wrong=("thread 0: result 1 is off by 2",), benches=8, tuned=4
        ),
        Round(1, 1.0, hang=True),
    ]
    _, text, _ = run(monkeypatch, lambda _: rounds, "--device", "cpu", "--workload", "flex", "--guard", "on")
    for heading in (
        "workload",
        "guard",
        "rounds",
        "failures",
        "dense calls",
        "hangs",
        "wrong values",
        "tunings per key",
    ):
        assert heading in text
    row = next(line for line in text.splitlines() if " flex " in line and " on " in line)
    assert row.replace("│", " ").replace("|", " ").split() == ["flex", "on", "2", "1", "1", "3", "1", "1", "2.00"]
    assert "E: one (2 threads" in text
    assert "thread 0: result 1 is off by 2" in text


def test_the_table_fits_a_terminal_of_80_columns():
    rows = [Row("triton-restore", True, 4, (Round(0, 1.0, dense=1_000, benches=8, tuned=4),), (), "", VERSIONS)]
    console = Console(file=io.StringIO(), width=80)
    console.print(table(rows, device="cpu", threads=4, seed=0))
    assert "…" not in console.file.getvalue()
    for word in ("triton-restore", "starts", "failures", "tunings", "1000"):
        assert word in console.file.getvalue()


def test_a_workload_that_never_fails_without_the_guard_is_said_to_prove_nothing(monkeypatch):
    _, text, _ = run(monkeypatch, clean, "--device", "cpu", "--workload", "flex")
    assert "flex: nothing went wrong without the guard either" in text


def test_the_file_has_all_rows(monkeypatch, tmp_path):
    run(monkeypatch, bad_without_guard, "--device", "cpu", "--workload", "mixed", "--json", "out/stress.json")
    found = json.loads((tmp_path / "out" / "stress.json").read_text(encoding="utf-8"))
    assert found["clean"] is True
    assert found["versions"] == VERSIONS
    on, off = found["rows"]
    assert (on["guard"], on["rounds"], on["failures"], on["tunings_per_key"]) == (True, 20, 0, 1.0)
    assert off["messages"] == {"RuntimeError: FX": 1, "ValueError: other": 1}


def test_all_that_the_machine_can_run_is_the_default(monkeypatch):
    _, _, batches = run(monkeypatch, clean, "--device", "cpu", "--guard", "on")
    assert {"compile", "mixed", "flex", "selection"} <= {b.name for b in batches}
    monkeypatch.setattr(stress_cpu.Tuner, "lacking", lambda self: "Triton is not installed")
    _, text, batches = run(monkeypatch, clean, "--device", "cpu", "--guard", "on")
    assert "triton" not in {b.name for b in batches}
    assert "triton is left out: Triton is not installed" in text


def test_asking_for_what_cannot_run_is_an_error_of_one_line(monkeypatch):
    monkeypatch.setattr(stress_cpu.Tuner, "lacking", lambda self: "Triton is not installed")
    with pytest.raises(CompilationError, match="workload triton cannot run here: Triton is not installed") as caught:
        run(monkeypatch, clean, "--device", "cpu", "--workload", "triton")
    assert "\n" not in str(caught.value)
    with pytest.raises(CompilationError, match="fla") as caught:
        run(monkeypatch, clean, "--device", "cpu", "--workload", "fla")
    assert "compile, flex" in str(caught.value)


@pytest.mark.parametrize("given", [["--rounds", "0"], ["--threads", "1"], ["--seconds", "-1"], ["--hang", "0"]])
def test_numbers_that_test_nothing_are_refused(monkeypatch, given):
    with pytest.raises(CompilationError, match=given[0]):
        run(monkeypatch, clean, "--device", "cpu", *given)


def test_time_is_shared_between_what_is_left(monkeypatch):
    _, _, batches = run(
        monkeypatch, clean, "--device", "cpu", "--workload", "mixed", "--workload", "flex", "--seconds", "100"
    )
    assert [round(b.seconds) for b in batches] == [25, 33, 50, 100]


def test_the_module_and_its_arguments_load_no_torch():
    code = (
        "import sys, argparse; from slipstream.compilation import stress; "
        "stress.add_arguments(argparse.ArgumentParser()); sys.exit('torch' in sys.modules or 'triton' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_some_real_rounds_of_the_tuner(tmp_path):
    pytest.importorskip("triton")
    given = arguments(
        *("--device", "cpu", "--workload", "triton-restore", "--rounds", "3", "--threads", "3", "--json", "found.json")
    )
    assert stress.run(given, Console(file=io.StringIO(), width=150)) == 0
    on, off = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))["rows"]
    assert (on["rounds"], on["bad"], on["tunings_per_key"]) == (3, 0, 1.0)
    assert off["bad"] == 3  # the test can fail


@pytest.mark.parametrize(
    "given", [("--hang", "nan"), ("--hang", "1e300"), ("--seed", "9" * 26), ("--threads", "1"), ("--device", "cuda")]
)
def test_numbers_and_devices_that_test_nothing_are_one_line(monkeypatch, given):
    import torch

    if given[0] == "--device" and torch.cuda.is_available():
        given = ("--rounds", "0")
    with pytest.raises(CompilationError, match=given[0]):
        run(monkeypatch, lambda _: [], *given)


def test_a_json_file_that_cannot_be_written_is_told_before_the_rounds(monkeypatch, tmp_path):
    with pytest.raises(CompilationError, match="cannot be written"):
        run(monkeypatch, lambda _: pytest.fail("rounds were played"), "--device", "cpu", "--json", str(tmp_path))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no device that is always full")
def test_a_file_that_no_figure_fits_into_is_one_line_after_the_table(monkeypatch, capsys):
    monkeypatch.setattr(stress, "play_batch", lambda batch, seen: Row(batch.name, batch.guard, 1, tuple(clean(batch))))
    assert main(["stress", "--device", "cpu", "--workload", "mixed", "--json", "/dev/full"]) == 2
    told = capsys.readouterr()
    assert "every guarded round was clean" in told.out
    (line,) = told.err.splitlines()
    assert line.startswith("slipstream: --json /dev/full cannot be written: No space left on device; ")
    assert "free space" in line
    assert Path("/dev/full").exists()


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("before", [None, "mine"])
def test_half_a_file_is_not_left(monkeypatch, tmp_path, error, before):
    def fills(path, text, **_):
        with path.open("w", encoding="utf-8") as stream:
            stream.write(text[:10])
        raise error

    path = tmp_path / "found.json"
    if before:
        path.write_text(before, encoding="utf-8")
    monkeypatch.setattr(Path, "write_text", fills)
    with pytest.raises(CompilationError if isinstance(error, OSError) else KeyboardInterrupt):
        run(monkeypatch, clean, "--device", "cpu", "--workload", "mixed", "--json", str(path))
    assert path.exists() is bool(before)  # a name that the user made stays


@pytest.fixture
def as_in_a_terminal():
    """A background job is started with SIGINT ignored, and what is ignored stays so."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("as_in_a_terminal")
def test_an_interrupted_run_leaves_no_empty_file_and_no_directory(monkeypatch, tmp_path):
    rmdir, before = Path.rmdir, [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    removed = []

    def interrupted(batch):
        with signals_interrupt():
            os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("the signal did nothing")

    def again(path):
        removed.append(path)
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        rmdir(path)

    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setattr(Path, "rmdir", again)
    (tmp_path / "link.json").symlink_to("missing.json")
    (tmp_path / "mine.json").write_text("mine", encoding="utf-8")
    for name in ("new.json", "link.json", "mine.json"):
        with pytest.raises(KeyboardInterrupt):
            run(monkeypatch, interrupted, "--device", "cpu", "--workload", "mixed", "--json", name)
    assert len(removed) == 3
    assert not list(temporary.iterdir())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.json", "mine.json", "temporary"]
    assert (tmp_path / "mine.json").read_text(encoding="utf-8") == "mine"
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
