"""Runs the checks by name, prints a line for each, and reports."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.config import Recipe
from slipstream.errors import ConfigError, SlipstreamError
from slipstream.preflight.block_checks import empty_batch, no_leak, packing_parity
from slipstream.preflight.data_checks import mask_token, render_parity
from slipstream.preflight.decoding_checks import lossless, overfit
from slipstream.preflight.report import CheckFailure, CheckResult, PreflightReport
from slipstream.preflight.rope_check import rope
from slipstream.preflight.subject import Subject
from slipstream.preflight.target_checks import head_parity, tied_head
from slipstream.preflight.training_checks import exact_resume, norms_move

if TYPE_CHECKING:
    from rich.console import Console

    from slipstream.training.session import PreparedRun

Check = Callable[[Subject], str]

CHEAP: dict[str, Check] = {
    "mask-token": mask_token,
    "head-parity": head_parity,
    "tied-head": tied_head,
    "render-parity": render_parity,
    "rope": rope,
    "packing-parity": packing_parity,
    "no-leak": no_leak,
    "empty-batch": empty_batch,
}
CHECKS: dict[str, Check] = {
    **CHEAP,
    "norms-move": norms_move,
    "overfit": overfit,
    "lossless": lossless,
    "exact-resume": exact_resume,
}


def run_check(name: str, subject: Subject) -> CheckResult:
    """Run one check. Faults that it finds, and errors that a user can mend, become its result; others escape."""
    began = time.monotonic()
    try:
        with subject.untouched():
            passed, detail = True, CHECKS[name](subject)
    except (CheckFailure, SlipstreamError) as error:
        passed, detail = False, " ".join(str(error).split())
    except Exception as error:
        error.add_note(f"while preflight ran {name}")
        raise
    return CheckResult(name=name, passed=passed, detail=detail, seconds=time.monotonic() - began)


def run_checks(run: PreparedRun, names: Sequence[str], *, console: Console | None = None) -> PreflightReport:
    """Run the named checks on a prepared run and print a line for each. Weights and generators stay as they were."""
    run = run.on_one_device()
    subject = Subject(run)
    results = []
    for name in names:
        if name not in CHEAP:
            _forget_compiled(run)
        result = run_check(name, subject)
        results.append(result)
        if console is not None:
            console.print(f"preflight {result.line()}", markup=False, highlight=False, soft_wrap=True)
    _forget_compiled(run)
    return PreflightReport(results=tuple(results))


def _forget_compiled(run: PreparedRun) -> None:
    """Give training, and each large check, all of the compiler's recompile limit: each has shapes of its own."""
    if run.device.type == "cuda":
        import torch

        torch._dynamo.reset()


def cheap_checks(console: Console | None = None) -> Callable[[PreparedRun], dict[str, Any] | None]:
    """Return the function that ``training.trainer.train`` takes as ``preflight``: the cheap checks, a few seconds.

    It returns the contents of ``preflight.json`` (None where the recipe sets ``training.preflight = false``, which is
    said) and raises PreflightError for the first check that fails.
    """

    def check(run: PreparedRun) -> dict[str, Any] | None:
        if not run.recipe.training.preflight:
            if console is not None:
                console.print("preflight is off (training.preflight = false): nothing was checked", markup=False)
            return None
        report = run_checks(run, list(CHEAP), console=console)
        report.raise_failure()
        return report.as_json()

    return check


def run_preflight(
    recipe: Recipe,
    *,
    output: Path | None = None,
    console: Console | None = None,
    checks: Sequence[str] | None = None,
    only_cheap: bool = False,
) -> PreflightReport:
    """Load what the recipe names, run the checks, print a line for each, and write the report to ``output`` (JSON).

    ``checks`` picks some by name; ``only_cheap`` those that every training run makes. Nothing else is written.
    Raises ConfigError for an unknown name, and the errors of target, data and drafter where they cannot be built.
    """
    from slipstream.provenance import write_json
    from slipstream.training.session import prepare

    names = list(checks) if checks is not None else list(CHEAP if only_cheap else CHECKS)
    unknown = [name for name in names if name not in CHECKS]
    if unknown:
        raise ConfigError(f"there is no preflight check {unknown[0]!r}; there are {', '.join(CHECKS)}")

    def say(text: str) -> None:
        if console is not None:
            console.print(text, markup=False, highlight=False, soft_wrap=True)

    report = run_checks(prepare(recipe, say=say), names, console=console)
    if output is not None:
        try:
            write_json(output, report.as_json())
        except OSError as error:
            raise ConfigError(
                f"--output {output} cannot be written: {error.strerror or error}; give another file"
            ) from None
    if report.passed:
        say(f"preflight: {len(names)} checks passed in {sum(r.seconds for r in report.results):.0f} s")
    else:
        say(f"preflight: {len(report.failed)} of {len(names)} checks failed: {', '.join(report.failed)}")
    return report
