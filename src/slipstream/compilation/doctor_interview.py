"""Questions about this installation, put to a fresh process whose life an answer may cost.

An import may fail, crash the interpreter or hang, and a hazard that is provoked leaves traces. So each kind of question
(``packages``, ``stock``, ``installed``) has a process of its own; where one dies, that is the answer to the question it
was at, and another process goes on with the next. The asking process never imports torch. What is answered is
``doctor_probe``'s.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipstream.compilation.doctor_places import is_there
from slipstream.errors import CompilationError

Answer = dict[str, Any]


class Interview:
    """Questions of one kind that are put to a fresh process, which starts at once. Use it as a context manager.

    Raises CompilationError where no process can be started. Not thread-safe; several may be under way at once.
    """

    def __init__(
        self, mode: str, names: Sequence[str], *, seconds: float = 180, own_directories: Sequence[str] = ()
    ) -> None:
        """Say what to ask.

        ``seconds``: how long a process may be silent before it is ended, and the question unanswered.
        ``own_directories``: variables that name a cache which cannot be used; the process gets an empty directory for
        each, so that its answers speak of what was asked and not of that cache.
        """
        self.mode, self.names, self.seconds, self._moved = mode, tuple(names), seconds, tuple(own_directories)
        self._found: dict[str, Answer] = {}
        try:
            self._directory = tempfile.TemporaryDirectory(prefix="slipstream-doctor-")
            self._out, self._errors = Path(self._directory.name, "answers"), Path(self._directory.name, "errors")
            self._process = self._start()
        except OSError as error:
            raise CompilationError(
                f"no process can be started to look at this installation ({error}); free disk and memory, or set "
                "TMPDIR to a directory that can be written"
            ) from error

    def _start(self) -> subprocess.Popen[bytes]:
        self._out.write_bytes(b"")
        rest = [name for name in self.names if name not in self._found]
        # The path is handed over, so that the process meets the very packages that this one would.
        code = (
            f"import sys; sys.path[:] = {sys.path!r}\n"
            f"from slipstream.compilation.doctor_probe import respond\n"
            f"respond({self.mode!r}, {rest!r}, {str(self._out)!r})"
        )
        with self._errors.open("wb") as errors:
            return subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                env={**os.environ, **{variable: str(Path(self._directory.name, variable)) for variable in self._moved}},
                # torch's CPU library (MKL) ends a process whose working directory has been removed
                cwd=None if is_there() else self._directory.name,
                start_new_session=True,
            )

    def __enter__(self) -> Interview:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self._directory.cleanup()

    def _end(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def answers(self) -> dict[str, Answer]:
        """Wait for every answer and return them by name; ``{"failed": why}`` for a question that has none."""
        while len(self._found) < len(self.names):
            silent = self._listen()
            ready = self._take()
            missing = [name for name in self.names if name not in self._found]
            if not missing:
                break
            why = {"failed": f"no answer within {self.seconds:g} s" if silent else self._death()}
            for name in missing[:1] if ready else missing:
                self._found[name] = why
            if ready and len(missing) > 1:
                self._process = self._start()
        return {name: self._found[name] for name in self.names}

    def _listen(self) -> bool:
        """Wait for the process's end; end it where it has been silent too long, and say whether it was."""
        size, since = -1, time.monotonic()
        while self._process.poll() is None:
            if (now := self._out.stat().st_size) != size:
                size, since = now, time.monotonic()
            if time.monotonic() - since > self.seconds:
                self._end()
                return True
            time.sleep(0.05)
        return False

    def _take(self) -> bool:
        """Take the answers that were written; say whether the process came as far as the first question."""
        ready = False
        for line in self._out.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                said = json.loads(line)
            except ValueError:  # cut off by the process's death
                continue
            ready = True
            if "name" in said:
                self._found[said["name"]] = said["answer"]
        return ready

    def _death(self) -> str:
        code = self._process.returncode
        try:
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        except ValueError:
            how = f"exit code {code}"
        said = self._errors.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return f"the process died ({how})" + (f": {' '.join(said[-1].split())[:200]}" if said else "")
