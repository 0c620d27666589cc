"""The parent of stress processes: starts them, reads their rounds, and tells a hang from a crash."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.compilation.stress_child import START_SECONDS
from slipstream.compilation.stress_plan import Order, Round, Row

# A hang costs its whole time limit; two are enough to see that it is no accident.
MOST_HANGS = 2
# A process that ends early before it has played anything will do so again.
MOST_FALSE_STARTS = 2
# The child ends a hang itself, so that every thread's stack is kept. This is for a child that cannot.
GRACE_SECONDS = 20.0


@dataclass(frozen=True)
class Batch:
    """All rounds of a workload with the guard, or without.

    reference: ``module:attribute``; seconds: after which no other round is begun (the first always is); hang: seconds
    after which a round is ended; keep: directory for the stacks of hangs and crashes.
    """

    name: str
    reference: str
    guard: bool
    rounds: int
    rounds_per_process: int
    threads: int
    seed: int
    seconds: float
    hang: float
    keep: Path


@dataclass
class _Ended:
    """How a child ended: rounds that it played, versions that it reported, and what is wrong if anything is."""

    rounds: list[Round]
    versions: dict[str, str]
    hang: bool = False
    error: str = ""
    stacks: str = ""


def play_batch(batch: Batch, on_round: Callable[[Round], None]) -> Row:
    """Play a batch in as many fresh processes as it needs; ``on_round`` is called after each round.

    A round that hangs is ended and counted, a process that dies is a failure of the round that it was in; the next
    round is played in a fresh process. Raises nothing for what goes wrong in children. No process and no file of the
    batch is left after a signal that ``signals_interrupt`` handles.
    """
    with signals_interrupt():
        return _play(batch, on_round)


class _Interrupt:
    """A signal handler that raises KeyboardInterrupt once: a second would cut short what the first began to remove.

    Repeats come here too, instead of being set to SIG_IGN: Python prints an error for a signal that it had already
    noticed when its handler was taken away.
    """

    def __init__(self) -> None:
        self._raised = False

    def __call__(self, number: int, frame: object) -> None:
        if not self._raised:
            self._raised = True
            raise KeyboardInterrupt


@contextlib.contextmanager
def signals_interrupt() -> Iterator[None]:
    """Let the first SIGTERM, SIGHUP or SIGINT raise KeyboardInterrupt, and ignore others until the block has ended.

    Only in the main thread, which alone may do so. A block inside another changes nothing: repeats are ignored to the
    end of the outer one, which has something to remove as well.
    """
    before: dict[signal.Signals, Any] = {}
    interrupt = _Interrupt()
    try:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                handler = signal.getsignal(number)
                # nohup and background jobs leave them ignored; None was not set from Python and cannot be restored
                if handler not in (signal.SIG_IGN, None) and not isinstance(handler, _Interrupt):
                    before[number] = handler
                    signal.signal(number, interrupt)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _play(batch: Batch, on_round: Callable[[Round], None]) -> Row:
    began, rounds, stacks, note = time.monotonic(), list[Round](), list[str](), ""
    versions: dict[str, str] = {}
    processes = false_starts = hangs = 0

    def seen(found: Round) -> None:
        rounds.append(found)
        on_round(found)

    while len(rounds) < batch.rounds:
        left = batch.seconds - (time.monotonic() - began)
        if rounds and left <= 0:
            note = f"stopped after {len(rounds)} of {batch.rounds} rounds: the time was up"
            break
        many = min(batch.rounds_per_process, batch.rounds - len(rounds))
        processes += 1
        ended = _child(batch, first=len(rounds), rounds=many, seconds=left, seen=seen)
        versions = versions or ended.versions
        if ended.stacks:
            stacks.append(ended.stacks)
        if ended.hang or ended.error:
            false_starts = 0 if ended.rounds else false_starts + 1
            seen(Round(len(rounds), 0.0, errors=(ended.error,) if ended.error else (), hang=ended.hang))
        hangs += ended.hang
        if len(rounds) < batch.rounds and hangs >= MOST_HANGS:
            note = f"stopped after {hangs} hangs, in {len(rounds)} of {batch.rounds} rounds"
            break
        if len(rounds) < batch.rounds and false_starts >= MOST_FALSE_STARTS:
            note = f"stopped: {false_starts} processes one after the other ended before their first round did"
            break
    return Row(batch.name, batch.guard, processes, tuple(rounds), tuple(stacks), note, versions)


def _child(batch: Batch, first: int, rounds: int, seconds: float, seen: Callable[[Round], None]) -> _Ended:
    guard = "on" if batch.guard else "off"
    stacks = batch.keep / f"{batch.name}-guard-{guard}-round-{first}.txt"
    # Errors of its removal: a child that ends in this very moment may be removing it as well.
    with tempfile.TemporaryDirectory(prefix="slipstream-stress-", ignore_cleanup_errors=True) as cache:
        order = Order(
            workload=batch.reference,
            guard=batch.guard,
            rounds=rounds,
            first=first,
            threads=batch.threads,
            seed=batch.seed,
            seconds=seconds,
            hang=batch.hang,
            stacks=str(stacks),
            cache=cache,
        )
        noise = Path(cache, "noise.txt")
        process: subprocess.Popen[str] | None = None
        try:
            with noise.open("wb") as stderr:
                process = subprocess.Popen(
                    [sys.executable, "-m", "slipstream.compilation.stress_child", order.to_json()],
                    stdin=subprocess.PIPE,  # nothing is written: the child ends when its other end is gone
                    stdout=subprocess.PIPE,
                    stderr=stderr,
                    env=_environment(),
                    text=True,
                )
            played, versions, killed = _read(process, max(batch.hang, START_SECONDS) + GRACE_SECONDS, seen)
        except BaseException:
            _end(process)
            stacks.unlink(missing_ok=True)  # of a round that was cut short, not of a hang
            raise
        _end(process)
        told = noise.read_text(encoding="utf-8", errors="replace")
    code = process.returncode
    dumped = stacks.read_text(encoding="utf-8", errors="replace") if stacks.exists() else ""
    if code == 0 or len(played) == rounds:
        stacks.unlink(missing_ok=True)
        return _Ended(played, versions)
    hang = killed or "Timeout (" in dumped
    kept = ""
    if dumped or hang:
        stacks.write_text(f"{dumped}\n{told[-20_000:]}", encoding="utf-8")
        kept = str(stacks)
    else:
        stacks.unlink(missing_ok=True)
    return _Ended(played, versions, hang, "" if hang else _death(code, told), kept)


def _end(process: subprocess.Popen[str] | None) -> None:
    if process is not None:
        process.kill()  # first: at the end of its pipe it would begin to remove the caches itself
        with process:
            process.wait()


def _environment() -> dict[str, str]:
    """Return the child's variables: they say nothing of caches, which the child sets for each round."""
    environment = dict(os.environ)
    # Threads of the workload are what is tested; on tensors this small, torch's own only take time.
    environment.setdefault("OMP_NUM_THREADS", "1")
    environment.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    # FLA and Triton keep no choice of theirs from one process to the next.
    environment.pop("TRITON_CACHE_AUTOTUNING", None)
    return environment


def _read(
    process: subprocess.Popen[str], patience: float, seen: Callable[[Round], None]
) -> tuple[list[Round], dict[str, str], bool]:
    """Return (rounds, versions, whether it had to be killed) when the child has closed its output."""
    assert process.stdout is not None
    played: list[Round] = []
    versions: dict[str, str] = {}
    killed = threading.Event()

    def kill() -> None:
        killed.set()
        process.kill()

    def timer() -> threading.Timer:
        made = threading.Timer(patience, kill)
        made.daemon = True
        made.start()
        return made

    watch = timer()
    try:
        for line in process.stdout:
            watch.cancel()
            values = json.loads(line)
            if "torch" in values:
                versions = values
            else:
                played.append(Round.from_json(line))
                seen(played[-1])
            watch = timer()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=patience)
    finally:
        watch.cancel()
    return played, versions, killed.is_set()


def _death(code: int, told: str) -> str:
    how = f"code {code}" if code >= 0 else signal.Signals(-code).name
    lines = [line.strip() for line in told.splitlines() if line.strip()]
    return f"the process ended with {how}" + (f": {lines[-1][:240]}" if lines else "")
