from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream.compilation import stress_parent
from slipstream.compilation.stress_parent import Batch, play_batch

SOURCE = Path(__file__).resolve().parents[3] / "src"
SAMPLES = """
import os, threading, time
import torch
from slipstream.compilation.stress_rounds import Cold, Workload


class Clean(Workload):
    name, device, rounds_per_process = "clean", "cpu", 2

    def work(self, thread, number):
        return lambda: [torch.tensor([float(thread + number)])]

    def cold(self, number, seed, threads):
        alone = [self.__class__.__mro__[-3].work(self, i, number) for i in range(threads)]
        return Cold([self.work(i, number) for i in range(threads)], alone, [0.0] * threads)


class Raises(Clean):
    def work(self, thread, number):
        def body():
            raise KeyError(f"round {number % 2}")
        return body


class Wrong(Clean):
    def work(self, thread, number):
        return lambda: [torch.tensor([float(thread + number + (thread == 1))])]


class Hangs(Clean):
    def work(self, thread, number):
        def waits_for_nothing():
            if number == 1 and thread == 0:
                threading.Event().wait()
            return super(Hangs, self).work(thread, number)()
        return waits_for_nothing


class Dies(Clean):
    def work(self, thread, number):
        def body():
            if number == 1:
                os._exit(3)
            return super(Dies, self).work(thread, number)()
        return body


class Slow(Clean):
    def work(self, thread, number):
        def body():
            time.sleep(0.4)
            return super(Slow, self).work(thread, number)()
        return body


class Chatty(Clean):
    def work(self, thread, number):
        def body():
            print("this is no result", flush=True)
            return super(Chatty, self).work(thread, number)()
        return body
"""


@pytest.fixture
def batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Batch:
    (tmp_path / "stress_samples.py").write_text(SAMPLES, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    return Batch(
        name="sample",
        reference="stress_samples:Clean",
        guard=False,
        rounds=4,
        rounds_per_process=2,
        threads=2,
        seed=0,
        seconds=120.0,
        hang=20.0,
        keep=tmp_path,
    )


def play(batch: Batch, name: str, **changes: object):
    seen = []
    row = play_batch(dataclasses.replace(batch, reference=f"stress_samples:{name}", **changes), seen.append)
    assert tuple(seen) == row.rounds
    return row


def test_clean_rounds_in_fresh_processes(batch):
    row = play(batch, "Clean", rounds=3, guard=True)
    assert [r.number for r in row.rounds] == [0, 1, 2]
    assert row.processes == 2
    assert row.clean
    assert row.guard
    assert not row.stacks
    assert row.versions["torch"]


def test_a_workload_that_fails_is_seen(batch):
    row = play(batch, "Raises")
    assert row.failures == 4
    assert row.messages() == [("KeyError: 'round 0'", 4), ("KeyError: 'round 1'", 4)]


def test_wrong_values_are_seen(batch):
    row = play(batch, "Wrong", rounds=2)
    assert (row.failures, row.wrong, row.bad) == (0, 2, 2)
    assert row.rounds[0].wrong == ("thread 1: result 0 is off by 1",)


def test_a_hang_is_ended_its_stacks_are_kept_and_the_next_round_is_played(batch):
    row = play(batch, "Hangs", hang=5.0)
    assert [(r.number, r.hang) for r in row.rounds] == [(0, False), (1, True), (2, False), (3, False)]
    assert row.hangs == 1
    (stacks,) = row.stacks
    assert "waits_for_nothing" in Path(stacks).read_text(encoding="utf-8")


@pytest.mark.slow
def test_after_two_hangs_no_more_are_waited_for(batch):
    source = Path(batch.keep, "stress_samples.py")
    source.write_text(SAMPLES.replace("number == 1 and thread == 0", "thread == 0"), encoding="utf-8")
    row = play(batch, "Hangs", hang=5.0)
    assert (row.hangs, len(row.rounds)) == (2, 2)
    assert "2 hangs" in row.note


def test_a_process_that_dies_is_a_failure_of_its_round(batch):
    row = play(batch, "Dies")
    assert [(r.number, bool(r.errors)) for r in row.rounds] == [(0, False), (1, True), (2, False), (3, False)]
    assert row.messages()[0][0].startswith("the process ended with code 3")


def test_a_process_that_cannot_start_is_a_failure(batch):
    row = play(batch, "Missing")
    assert row.failures == len(row.rounds) == 2
    assert "Missing" in row.messages()[0][0]


def test_what_a_workload_prints_is_no_result(batch):
    assert play(batch, "Chatty", rounds=2).clean


def test_no_round_is_begun_after_the_time_is_up(batch):
    row = play(batch, "Slow", rounds=40, rounds_per_process=40, seconds=0.1)
    assert len(row.rounds) == 1
    assert "1 of 40" in row.note


PARENT = """
import json, sys
from pathlib import Path
from slipstream.compilation.stress_parent import Batch, play_batch
given = json.loads(sys.argv[1])
play_batch(Batch(**{**given, "keep": Path(given["keep"])}), lambda found: None)
"""


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def within(seconds: float, happened: Callable[[], bool]) -> bool:
    end = time.monotonic() + seconds
    while not happened() and time.monotonic() < end:
        time.sleep(0.05)
    return happened()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGKILL])
def test_a_parent_that_is_ended_leaves_no_child_and_no_caches(batch: Batch, number: signal.Signals) -> None:
    temporary, told = batch.keep / "temporary", batch.keep / "told"
    temporary.mkdir()
    source = batch.keep / "stress_samples.py"
    body = f"open({str(told)!r}, 'w').write(str(os.getpid())); threading.Event().wait()"
    source.write_text(
        SAMPLES.replace("if number == 1 and thread == 0:", f"{body}\n            if 1:"), encoding="utf-8"
    )
    given = dataclasses.asdict(dataclasses.replace(batch, reference="stress_samples:Hangs", keep=str(temporary)))
    # Whatever the shell said: nohup and background jobs start their children with these ignored.
    before = {ignored: signal.signal(ignored, signal.SIG_DFL) for ignored in (signal.SIGHUP, signal.SIGINT)}
    try:
        parent = subprocess.Popen(
            [sys.executable, "-c", PARENT, json.dumps(given)],
            env={**os.environ, "PYTHONPATH": f"{SOURCE}:{os.environ['PYTHONPATH']}", "TMPDIR": str(temporary)},
            stderr=subprocess.DEVNULL,
        )
    finally:
        for ignored, handler in before.items():
            signal.signal(ignored, handler)
    try:
        assert within(120, lambda: told.exists() and told.read_text(encoding="utf-8") != "")
        child = int(told.read_text(encoding="utf-8"))
        assert alive(child)
        parent.send_signal(number)
        if number in (signal.SIGTERM, signal.SIGHUP):
            parent.send_signal(number)  # an impatient one changes nothing
        parent.wait(30)
        assert within(30, lambda: not alive(child))
        assert within(30, lambda: not list(temporary.iterdir())), list(temporary.rglob("*"))
    finally:
        parent.kill()


def test_a_hangup_is_ignored_where_nohup_says_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stress_parent._signals_interrupt():
            os.kill(os.getpid(), signal.SIGHUP)
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
