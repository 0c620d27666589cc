from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream.compilation.stress_parent import Batch, play_batch, signals_interrupt
from slipstream.compilation.stress_plan import Order

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
import json, sys, time
from slipstream.compilation import stress, stress_parent
from slipstream.compilation.stress_parent import Batch, play_batch, signals_interrupt
end = stress_parent._end
stress_parent._end = lambda process: (time.sleep(0.3), end(process))  # repeats come while it cleans up
with signals_interrupt(), stress._stacks_directory() as keep:
    play_batch(Batch(**{**json.loads(sys.argv[1]), "keep": keep}), lambda found: None)
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


@pytest.mark.parametrize(
    "numbers",
    [
        (signal.SIGTERM, signal.SIGTERM),
        (signal.SIGHUP, signal.SIGHUP),
        (signal.SIGINT, signal.SIGINT),
        (signal.SIGTERM, signal.SIGINT),
        (signal.SIGINT, signal.SIGTERM, signal.SIGINT),
        (signal.SIGKILL,),
    ],
    ids=lambda numbers: "-".join(number.name for number in numbers),
)
def test_a_parent_that_is_ended_leaves_no_child_and_no_file(batch: Batch, numbers: tuple[signal.Signals, ...]) -> None:
    temporary, told = batch.keep / "temporary", batch.keep / "told"
    temporary.mkdir()
    source = batch.keep / "stress_samples.py"
    body = f"open({str(told)!r}, 'w').write(str(os.getpid())); threading.Event().wait()"
    source.write_text(
        SAMPLES.replace("if number == 1 and thread == 0:", f"{body}\n            if 1:"), encoding="utf-8"
    )
    given = dataclasses.asdict(dataclasses.replace(batch, reference="stress_samples:Hangs", keep=""))
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
        assert {path.name[:23] for path in temporary.iterdir()} >= {"slipstream-stress-stack"}
        for number in numbers:  # an impatient one changes nothing
            parent.send_signal(number)
            time.sleep(0.05)
        parent.wait(30)
        assert within(30, lambda: not alive(child))
        assert within(30, lambda: not list(temporary.iterdir())), list(temporary.rglob("*"))
    finally:
        parent.kill()


def test_a_killed_parent_s_child_leaves_the_stacks_of_earlier_hangs(tmp_path: Path) -> None:
    room = tmp_path / "stacks"
    room.mkdir()
    (room / "earlier.txt").write_text("a hang", encoding="utf-8")
    (room / "now.txt").touch()
    order = Order(
        workload="", guard=False, rounds=1, first=0, threads=2, seed=0, seconds=1.0, hang=1.0,
        stacks=str(room / "now.txt"), cache=str(tmp_path / "cache"),
    )  # fmt: skip
    code = (
        "import sys, time; from slipstream.compilation import stress_child, stress_plan\n"
        "stress_child._end_with_parent(stress_plan.Order.from_json(sys.argv[1])); time.sleep(60)"
    )
    done = subprocess.run([sys.executable, "-c", code, order.to_json()], input=b"", check=False, timeout=60)
    assert done.returncode == 1
    assert [path.name for path in room.iterdir()] == ["earlier.txt"]


def test_a_hangup_is_ignored_where_nohup_says_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals_interrupt():
            os.kill(os.getpid(), signal.SIGHUP)
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


HANDLED = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


def test_the_first_signal_interrupts_and_handlers_are_restored() -> None:
    before = [signal.getsignal(number) for number in HANDLED]

    def interrupted() -> None:
        with signals_interrupt():
            try:
                with signals_interrupt():  # one inside another does not let repeats through at its own end
                    os.kill(os.getpid(), signal.SIGINT)
            finally:
                for number in HANDLED:
                    os.kill(os.getpid(), number)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [signal.getsignal(number) for number in HANDLED] == before


def test_signals_are_left_alone_in_another_thread() -> None:
    before, seen = [signal.getsignal(number) for number in HANDLED], []

    def other() -> None:
        with signals_interrupt():
            seen.extend(signal.getsignal(number) for number in HANDLED)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen == before
