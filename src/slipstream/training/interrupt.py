"""Ctrl-C and SIGTERM during training: finish the step, save, leave. A second Ctrl-C leaves at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any


class Interrupts:
    """While entered, the first SIGINT or SIGTERM only sets ``received`` (its name). Inert outside the main thread.

    A signal that the process was told to ignore stays ignored: shells start background jobs so.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.received: str | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            wanted = [number for number in self.SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
            self._before = {number: signal.signal(number, self._handle) for number in wanted}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number).name
        self._restore()
        # Not print: the signal may have come in the middle of one, and buffered streams cannot be entered twice.
        line = f"\n{self.received}: saving a checkpoint after this step; once more stops at once, without one\n"
        os.write(sys.__stderr__.fileno() if sys.__stderr__ is not None else 2, line.encode())
