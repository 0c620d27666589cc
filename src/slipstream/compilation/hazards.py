"""What a hazard of compilation under threads is, and what is known about each on this installation.

Nothing here imports torch: the hazards' own modules do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Status = Literal["handled", "safe upstream", "not imported yet", "not installed", "unknown"]


@dataclass(frozen=True)
class Hazard:
    """A piece of process-wide state that threads which compile or autotune would share.

    name: as reports show it; what: what goes wrong without care, one line; module: the module that it lives in.
    needed(): whether this installation has the hazard (a feature test; the module is imported).
    unknown(): what is not as the fix expects, or nothing; then the fix is not applied.
    apply(): put the fix in force; called once. check(): provoke the hazard and return what went wrong, or nothing; a
    few milliseconds, harmless to other threads, callable in any thread.
    """

    name: str
    what: str
    module: str
    needed: Callable[[], bool]
    unknown: Callable[[], str]
    apply: Callable[[], None]
    check: Callable[[], str]


@dataclass(frozen=True)
class State:
    """What was found and done about one hazard. ``detail`` tells more where there is more to tell."""

    name: str
    status: Status
    detail: str = ""


@dataclass(frozen=True)
class Report:
    """All hazards, in the order in which they were looked at."""

    states: tuple[State, ...]

    def __str__(self) -> str:
        return "; ".join(f"{s.name}: {s.status}" + (f" ({s.detail})" if s.detail else "") for s in self.states)

    def __getitem__(self, name: str) -> State:
        return next(s for s in self.states if s.name == name)
