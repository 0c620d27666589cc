"""What a stress run asks of its child processes, and what they find: plain records, as JSON between the processes."""

from __future__ import annotations

import collections
import dataclasses
import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Order:
    """What one child process does.

    workload: ``module:attribute`` of a ``Workload``; guard: whether ``install`` holds the races off; rounds: how many,
    numbered from ``first``; seconds: after which no other round is begun; hang: seconds after which a round is ended;
    stacks: file for every thread's stack; cache: empty directory for the compilers' caches.
    """

    workload: str
    guard: bool
    rounds: int
    first: int
    threads: int
    seed: int
    seconds: float
    hang: float
    stacks: str
    cache: str

    def to_json(self) -> str:
        """Return the order as one line."""
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> Order:
        """Return the order that ``to_json`` wrote."""
        return Order(**json.loads(text))


@dataclass(frozen=True)
class Round:
    """What one cold round found.

    errors: a message for each thread that raised; dense: uncompiled calls of flex attention; wrong: a line for each
    thread whose outputs or gradients differ from those of the same work done alone; benches: how often a configuration
    was timed, tuned: how many different ones were (by kernel, device, key and configuration); hang: it was ended;
    left_out: what a library refuses to do on this machine, which no thread is to blame for.
    """

    number: int
    seconds: float
    errors: tuple[str, ...] = ()
    dense: int = 0
    wrong: tuple[str, ...] = ()
    benches: int = 0
    tuned: int = 0
    hang: bool = False
    left_out: tuple[str, ...] = ()

    @property
    def bad(self) -> bool:
        """Whether anything went wrong. A kernel that is tuned twice is waste, not a fault."""
        return bool(self.errors or self.dense or self.wrong or self.hang)

    def to_json(self) -> str:
        """Return the round as one line."""
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> Round:
        """Return the round that ``to_json`` wrote."""
        values = json.loads(text)
        return Round(**values | {name: tuple(values[name]) for name in ("errors", "wrong", "left_out")})


@dataclass(frozen=True)
class Row:
    """All rounds of a workload with the guard, or without.

    stacks: files with the stacks of hangs and crashes; note: why rounds are missing; versions: those of the children.
    """

    workload: str
    guard: bool
    processes: int
    rounds: tuple[Round, ...]
    stacks: tuple[str, ...] = ()
    note: str = ""
    versions: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def failures(self) -> int:
        """Rounds in which a thread raised."""
        return sum(bool(r.errors) for r in self.rounds)

    @property
    def dense(self) -> int:
        """Uncompiled calls of flex attention."""
        return sum(r.dense for r in self.rounds)

    @property
    def hangs(self) -> int:
        """Rounds that were ended."""
        return sum(r.hang for r in self.rounds)

    @property
    def wrong(self) -> int:
        """Threads, over all rounds, with wrong values."""
        return sum(len(r.wrong) for r in self.rounds)

    @property
    def bad(self) -> int:
        """Rounds in which anything went wrong."""
        return sum(r.bad for r in self.rounds)

    @property
    def clean(self) -> bool:
        """Whether there were rounds, and nothing went wrong in any."""
        return bool(self.rounds) and not self.bad

    @property
    def tunings(self) -> float | None:
        """How often each configuration was timed, on average; None where nothing is tuned."""
        tuned = sum(r.tuned for r in self.rounds)
        return sum(r.benches for r in self.rounds) / tuned if tuned else None

    def messages(self) -> list[tuple[str, int]]:
        """Return (message, threads that raised it), the commonest first."""
        return collections.Counter(e for r in self.rounds for e in r.errors).most_common()

    def left_out(self) -> list[str]:
        """Return what was left out of some round, each once."""
        return list(dict.fromkeys(text for r in self.rounds for text in r.left_out))

    def figures(self) -> dict[str, Any]:
        """Return every figure, for JSON."""
        return {
            "workload": self.workload,
            "guard": self.guard,
            "rounds": len(self.rounds),
            "processes": self.processes,
            "failures": self.failures,
            "dense_calls": self.dense,
            "hangs": self.hangs,
            "wrong_values": self.wrong,
            "bad": self.bad,
            "tunings_per_key": self.tunings,
            "seconds": sum(r.seconds for r in self.rounds),
            "messages": dict(self.messages()),
            "wrong": [f"round {r.number}, {line}" for r in self.rounds for line in r.wrong],
            "stacks": list(self.stacks),
            "left_out": self.left_out(),
            "note": self.note,
        }
