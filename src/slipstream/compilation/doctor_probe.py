"""Questions about this installation that only a fresh process can answer, and that may cost its life.

An import may fail, crash the interpreter or hang, and a hazard that is provoked leaves traces. So each kind of question
(``packages``, ``stock``, ``installed``) has a process of its own; where one dies, that is the answer to the question it
was at, and another process goes on with the next. The asking process never imports torch.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from slipstream.compilation.hooks import installed
from slipstream.compilation.safety import HAZARDS, install, report, verify
from slipstream.errors import CompilationError

HAZARD_NAMES = tuple(hazard.name for hazard in HAZARDS)
PACKAGE_QUESTIONS = ("torch", "gpus", "compile", "triton", "fla", "transformers")
INSTALLED_QUESTIONS = (*HAZARD_NAMES, "verify")
Answer = dict[str, Any]


def one_line(error: BaseException) -> str:
    """Return the error's kind and text as one line of at most 300 characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300].removesuffix(":")


class Interview:
    """Questions of one kind that are put to a fresh process, which starts at once. Use it as a context manager.

    Raises CompilationError where no process can be started. Not thread-safe; several may be under way at once.
    """

    def __init__(self, mode: str, names: Sequence[str], *, seconds: float = 180) -> None:
        """``seconds``: how long a process may be silent before it is ended, and the question unanswered."""
        self.mode, self.names, self.seconds = mode, tuple(names), seconds
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


# -- what runs in the fresh process -----------------------------------------------------------------------------------


def respond(mode: str, names: Sequence[str], out: str) -> None:
    """Answer the questions in order, a line of JSON each, into the file ``out``; then leave the process at once."""
    with open(out, "a", encoding="utf-8") as stream:
        _say(stream, {"begin": mode})
        if mode == "installed":
            _install()
            _say(stream, {"installed": True})
        for name in names:
            try:
                answer = _ANSWERS[mode](name)
            except (Exception, SystemExit) as error:
                answer = {"failed": one_line(error)}
            _say(stream, {"name": name, "answer": answer})
    os._exit(0)  # threads that a hazard has left hanging are not waited for


def _say(stream: Any, payload: dict[str, Any]) -> None:
    stream.write(json.dumps(payload) + "\n")
    stream.flush()


def _package(name: str) -> Answer:
    if not installed(name):
        return {"version": None, "failed": ""}
    module = importlib.import_module(name)
    if name == "fla":  # the package itself is lazy; this is what all of its kernels import
        importlib.import_module("fla.utils")
    return {"version": getattr(module, "__version__", None), "failed": ""}


def _torch(_: str) -> Answer:
    if not installed("torch"):
        return {"version": None, "git_commit": None, "cuda": None, "failed": ""}
    import torch

    return {
        "version": str(torch.__version__),
        "git_commit": torch.version.git_version,
        "cuda": torch.version.cuda,
        "failed": "",
    }


def _compile(_: str) -> Answer:
    """Compile a function with a backend that only notes that it was called."""
    import torch

    called: list[bool] = []

    def backend(graph: Any, _: Any) -> Any:
        called.append(True)
        return graph.forward

    torch.compile(lambda x: x + 1, backend=backend)(torch.zeros(1))
    return {"compiled": bool(called)}


def _gpus(_: str) -> Answer:
    """Look at each GPU, and run something on it; where there is none, say what CUDA says of that."""
    import torch

    if not torch.cuda.is_available():
        why = ""
        if torch.version.cuda is not None:
            try:
                torch.cuda.init()
            except Exception as error:
                why = one_line(error)
        return {"gpus": [], "peers": [], "no_gpu": why}
    count = torch.cuda.device_count()
    peers = [[_peer(a, b) for b in range(count)] for a in range(count)]
    return {"gpus": [_gpu(index) for index in range(count)], "peers": peers, "no_gpu": ""}


def _peer(a: int, b: int) -> bool | None:
    import torch

    return None if a == b else bool(torch.cuda.can_device_access_peer(a, b))


def _gpu(index: int) -> Answer:
    import torch

    properties = torch.cuda.get_device_properties(index)
    found: Answer = {
        "index": index,
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_total": properties.total_memory,
        "memory_free": None,
        "failed": "",
    }
    try:
        found["memory_free"] = torch.cuda.mem_get_info(index)[0]
        if (torch.ones(8, device=f"cuda:{index}") + 1).sum().item() != 16:
            found["failed"] = "it adds wrongly"
    except Exception as error:
        found["failed"] = one_line(error)
    return found


def _there(name: str) -> bool:
    """Whether the hazard's package is installed here; as ``install`` sees it."""
    hazard = next(h for h in HAZARDS if h.name == name)
    return installed(hazard.module.split(".")[0]) and (name != "inductor-autotuner" or installed("triton"))


def _assign() -> None:
    """Assign a setting, as a program might: what the hazard of settings that hold in one thread only needs to show."""
    config: Any = importlib.import_module("torch._functorch.config")
    if "activation_memory_budget" in config._config:
        config.activation_memory_budget = 0.99


def _stock(name: str) -> Answer:
    """Provoke a hazard where nothing has been made safe."""
    hazard = next(h for h in HAZARDS if h.name == name)
    if not _there(name):
        return {"status": "not installed", "detail": ""}
    importlib.import_module(hazard.module)
    if name == "thread-config":
        _assign()
    needed = hazard.needed()
    try:
        seen = hazard.check()
    except Exception as error:  # a launch that the other thread has spoiled, for one
        seen = one_line(error)
    if seen:
        return {"status": "present", "detail": " ".join(seen.split())}
    return {"status": "not seen" if needed else "safe upstream", "detail": ""}


def _install() -> None:
    """Make safe as a program does, and then import all that it was for. What cannot be imported is told elsewhere."""
    try:
        _assign()
        install(allow_unknown=True)
    except Exception as error:
        _broken.append(one_line(error))
    for hazard in HAZARDS:
        try:
            importlib.import_module(hazard.module)
        except (Exception, SystemExit):
            continue


_broken: list[str] = []


def _installed(name: str) -> Answer:
    """Return what ``install`` did about a hazard, and what is seen when it is provoked, here and in a new thread."""
    if _broken:
        return {"failed": f"install() failed: {_broken[0]}"}
    if name == "verify":
        return {"seen": _twice(_verify)}
    state = report()[name]
    hazard = next(h for h in HAZARDS if h.name == name)
    seen = _twice(hazard.check) if state.status in ("handled", "safe upstream") else ""
    return {"status": state.status, "detail": " ".join(state.detail.split()), "seen": seen}


def _verify() -> str:
    verify()
    return ""


def _twice(check: Callable[[], str]) -> str:
    """Return what a check sees in this thread, or else in a new one; nothing where it sees nothing."""
    seen: list[str] = []

    def run() -> None:
        try:
            seen.append(check())
        except Exception as error:
            seen.append(one_line(error))

    run()
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return " ".join(next((text for text in seen if text), "").split())


_ANSWERS: dict[str, Callable[[str], Answer]] = {
    "packages": lambda name: {"torch": _torch, "compile": _compile, "gpus": _gpus}.get(name, _package)(name),
    "stock": _stock,
    "installed": _installed,
}
