"""What the checks found: one line each, and ``preflight.json``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slipstream.errors import PreflightError


class CheckFailure(Exception):
    """A check found a fault. The message is one line: the cause, the values, and the cure. Never leaves the runner."""


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """One check: its name, whether it passed, what was measured (or cause and cure), and its seconds."""

    name: str
    passed: bool
    detail: str
    seconds: float

    def line(self) -> str:
        """Return the line that is printed."""
        return f"{self.name} {'ok' if self.passed else 'FAILED'}: {self.detail} ({self.seconds:.1f} s)"


@dataclass(frozen=True, kw_only=True)
class PreflightReport:
    """All results in the order in which the checks ran."""

    results: tuple[CheckResult, ...]

    @property
    def passed(self) -> bool:
        """Whether every check passed."""
        return all(result.passed for result in self.results)

    @property
    def failed(self) -> tuple[str, ...]:
        """Names of the checks that failed."""
        return tuple(result.name for result in self.results if not result.passed)

    def raise_failure(self) -> None:
        """Raise PreflightError for the first check that failed."""
        for result in self.results:
            if not result.passed:
                raise PreflightError(result.name, result.detail)

    def as_json(self) -> dict[str, Any]:
        """Return plain JSON values: the contents of ``preflight.json``."""
        return {
            "passed": self.passed,
            "failed": list(self.failed),
            "seconds": round(sum(r.seconds for r in self.results), 3),
            "checks": {
                r.name: {"passed": r.passed, "detail": r.detail, "seconds": round(r.seconds, 3)} for r in self.results
            },
        }
