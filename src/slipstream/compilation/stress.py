"""``slipstream stress``: threads that compile and tune at once, on cold caches, with the guard and without.

Every workload is played in fresh processes. What goes wrong without the guard shows that the workload can fail here;
what goes wrong with it is a fault.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.compilation import stress_cpu, stress_cuda, stress_flex
from slipstream.compilation.stress_parent import Batch, play_batch, signals_interrupt
from slipstream.compilation.stress_plan import Row
from slipstream.compilation.stress_rounds import Workload
from slipstream.compilation.stress_table import Display, explain, table
from slipstream.errors import CompilationError

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["add_arguments", "run"]

WORKLOADS: tuple[type[Workload], ...] = (
    *stress_cpu.WORKLOADS,
    *stress_flex.WORKLOADS,
    *stress_cuda.WORKLOADS,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments. Loads no torch."""
    names = sorted({work.name for work in WORKLOADS})
    parser.add_argument(
        "--workload",
        action="append",
        choices=[*names, "all"],
        help=f"{', '.join(names)}; may be given several times (default: all that this machine can run)",
    )
    parser.add_argument("--guard", choices=("on", "off", "both"), default="both", help="default: both")
    parser.add_argument(
        "--rounds", type=int, default=20, metavar="N", help="cold rounds of each workload (default: 20)"
    )
    parser.add_argument("--threads", type=int, default=4, metavar="N", help="threads of each round (default: 4)")
    parser.add_argument(
        "--seconds", type=float, metavar="S", help="time for everything, shared evenly (default: no limit)"
    )
    parser.add_argument("--hang", type=float, metavar="S", help="end a round after so long (default: 60, on CUDA 180)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the inputs (default: 0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure to FILE as well")


def run(args: argparse.Namespace, console: Console) -> int:
    """Play what ``args`` ask for and print one table; return 0 if every guarded round was clean, else 1.

    Raises CompilationError for a workload that cannot run here, for numbers that would test nothing, and for a file
    that cannot be written, if only after the table. torch is loaded only to look for a GPU, if no device is given: the
    work is done in child processes.
    """
    for name, least, most in (
        ("rounds", 1, 10**6),
        ("threads", 2, 1024),
        ("seconds", 1, 10**7),
        ("hang", 1, 10**5),
        ("seed", 0, 2**63 - 1),
    ):
        value = getattr(args, name)
        if value is not None and not least <= value <= most:  # false for nan too
            raise CompilationError(f"--{name} is {value:g}; give {least} to {most}")
    device = args.device or _device()
    if device == "cuda" and _device() != "cuda":
        raise CompilationError("--device is cuda, but torch sees no GPU here; leave it out, or see `slipstream doctor`")
    if args.json is not None:
        _try_to_open(args.json)  # now, not after all the rounds
    works = _chosen(args.workload, device, console)
    guards = {"on": (True,), "off": (False,), "both": (True, False)}[args.guard]
    hang = args.hang or (60.0 if device == "cpu" else 180.0)
    ends = time.monotonic() + args.seconds if args.seconds else float("inf")
    wanted = [(work, guard) for work in works for guard in guards]
    rows: list[Row] = []
    with signals_interrupt(), _stacks_directory() as keep, Display(console, total=len(wanted) * args.rounds) as display:
        for place, (work, guard) in enumerate(wanted):
            display.begin(work.name, guard)
            batch = Batch(
                name=work.name,
                reference=f"{type(work).__module__}:{type(work).__qualname__}",
                guard=guard,
                rounds=args.rounds,
                rounds_per_process=work.rounds_per_process,
                threads=args.threads,
                seed=args.seed,
                seconds=(ends - time.monotonic()) / (len(wanted) - place),
                hang=hang,
                keep=keep,
            )
            row = play_batch(batch, display.seen)
            display.end(args.rounds, len(row.rounds))
            rows.append(row)
    guarded = [row for row in rows if row.guard]
    clean = all(row.clean for row in guarded)
    console.print(table(rows, device=device, threads=args.threads, seed=args.seed))
    for line in explain(rows):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if guarded:
        bad = [row.workload for row in guarded if not row.clean]
        told = f"not clean with the guard: {', '.join(bad)}" if bad else "every guarded round was clean"
        console.print(told, markup=False, highlight=False, soft_wrap=True)
    if args.json is not None:
        _write(args, device, rows, clean)
    return 0 if clean else 1


@contextlib.contextmanager
def _stacks_directory() -> Iterator[Path]:
    """Give a directory that stays where stacks of hangs and crashes were put into it."""
    keep = Path(tempfile.mkdtemp(prefix="slipstream-stress-stacks-"))
    try:
        yield keep
    finally:
        with contextlib.suppress(OSError):  # not empty
            keep.rmdir()


def _try_to_open(path: Path) -> None:
    there = os.path.exists(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a", encoding="utf-8").close()
    except OSError as error:
        raise CompilationError(f"--json {path} cannot be written: {error.strerror}; name another file") from None
    finally:
        if not there:  # an empty file would stay where the run is cut short
            _remove(path)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        os.unlink(os.path.realpath(path))  # of a link to a missing file, the file


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _chosen(names: list[str] | None, device: str, console: Console) -> list[Workload]:
    """Return the workloads that were asked for, or all that can run; what is left out is told."""
    here = [kind() for kind in WORKLOADS if kind.device == device]
    if not names or "all" in names:
        able = []
        for work in here:
            if why := work.lacking():
                console.print(f"{work.name} is left out: {why}", markup=False, highlight=False, soft_wrap=True)
            else:
                able.append(work)
        return able
    chosen = []
    for name in dict.fromkeys(names):
        found = next((w for w in here if w.name == name), None)
        if found is None:
            raise CompilationError(
                f"there is no workload {name} for {device}; choose from {', '.join(sorted(w.name for w in here))}"
            )
        if why := found.lacking():
            raise CompilationError(f"workload {name} cannot run here: {why}; leave --workload out to run what can")
        chosen.append(found)
    return chosen


def _write(args: argparse.Namespace, device: str, rows: list[Row], clean: bool) -> None:
    found = {
        "clean": clean,
        "versions": next((row.versions for row in rows if row.versions), {}),
        "device": device,
        "threads": args.threads,
        "seed": args.seed,
        "rows": [row.figures() for row in rows],
    }
    there = os.path.exists(args.json)
    try:
        args.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    except BaseException as error:
        if not there:  # half of it would be taken for a whole one
            _remove(args.json)
        if isinstance(error, OSError):
            raise CompilationError(
                f"--json {args.json} cannot be written: {error.strerror or error}; the rounds are in the table above; "
                "to have the file too, free space or name another"
            ) from None
        raise
