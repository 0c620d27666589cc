"""A child process of a stress run: plays the rounds of one order and writes a line for each.

``python -m slipstream.compilation.stress_child ORDER``. Lines of results are the only thing on its standard output.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import importlib.metadata
import json
import os
import shutil
import stat
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from slipstream.compilation.stress_plan import Order
from slipstream.compilation.stress_rounds import Counts, Workload, play

# What a process may take before its first round, whatever the limit of a round: torch is imported in it.
START_SECONDS = 120.0


def versions() -> dict[str, str]:
    """Return the versions that matter here; torch is imported."""
    import torch

    found = {"torch": torch.__version__, "python": sys.version.split()[0]}
    for name in ("triton", "fla-core"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    if torch.cuda.is_available():
        found["gpu"] = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    return found


def workload_of(reference: str) -> Workload:
    """Return an instance of ``module:attribute``."""
    module, attribute = reference.split(":")
    made: Workload = getattr(importlib.import_module(module), attribute)()
    return made


def _compile_once() -> None:
    """Compile something in the main thread before any thread does.

    torch builds for CUDA initialise their device guard at the first compilation, and on a machine without a GPU that
    crashes the process (torch 2.11) if it happens in another thread. It also has dynamo imported once.
    """
    import torch

    torch.compile(lambda x: x + 1, backend="aot_eager")(torch.zeros(1))


def _guard(counts: Counts) -> Callable[[], None]:
    from slipstream.compilation.safety import install, verify

    install()

    def enter() -> None:
        with counts.paused():
            verify()

    return enter


def main(arguments: list[str]) -> int:
    """Play the order in ``arguments[0]``; return 0. A hang ends the process, with every thread's stack in a file."""
    order = Order.from_json(arguments[0])
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what others print must not be taken for results

    def write(text: str) -> None:
        lines.write(text + "\n")
        lines.flush()

    with open(order.stacks, "a", encoding="utf-8") as stacks:
        faulthandler.enable(stacks)
        faulthandler.dump_traceback_later(max(order.hang, START_SECONDS), exit=True, file=stacks)
        _caches(order.cache, "start")
        work, counts, began = workload_of(order.workload), Counts(), time.monotonic()
        enter: Callable[[], None] = lambda: None  # noqa: E731
        write(json.dumps(versions()))
        if order.guard:
            enter = _guard(counts)
        _compile_once()
        if work.uses_flex:
            counts.watch_flex()
        work.prepare(order.guard, counts)
        for number in range(order.first, order.first + order.rounds):
            if number > order.first and time.monotonic() - began > order.seconds:
                break
            faulthandler.dump_traceback_later(order.hang, exit=True, file=stacks)
            _caches(order.cache, str(number))
            cold = work.cold(number, order.seed, order.threads)
            counts.take()  # what was compiled and tuned beforehand does not count
            write(play(cold, number=number, enter=enter, counts=counts, tolerance=work.tolerance).to_json())
        faulthandler.cancel_dump_traceback_later()
        faulthandler.disable()
    return 0


def _caches(root: str, name: str) -> None:
    """Give inductor and Triton empty directories; both read the variables whenever they look something up."""
    for variable, folder in (("TORCHINDUCTOR_CACHE_DIR", "inductor"), ("TRITON_CACHE_DIR", "triton")):
        os.environ[variable] = os.path.join(root, name, folder)


def _end_with_parent(order: Order) -> None:
    """End this process when the parent has ended, however that was: it holds the other end of standard input.

    A thread waits for that in one read, without the interpreter's lock. Nothing is watched where standard input is
    no pipe, as when the module is run by hand. Processes that are started from here get an empty standard input.
    """
    if not stat.S_ISFIFO(os.fstat(0).st_mode):
        return
    pipe, empty = os.dup(0), os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)

    def watch() -> None:
        while os.read(pipe, 1):
            pass
        shutil.rmtree(order.cache, ignore_errors=True)  # the parent would have removed these
        with contextlib.suppress(OSError):
            os.unlink(order.stacks)
        with contextlib.suppress(OSError):  # not empty: stacks of earlier hangs and crashes stay
            os.rmdir(os.path.dirname(order.stacks))
        os._exit(1)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


def run_child(arguments: list[str]) -> Any:
    """Run ``main`` and end the process at once: threads that a round left behind must not hold it."""
    _end_with_parent(Order.from_json(arguments[0]))
    code = main(arguments)
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    run_child(sys.argv[1:])
