"""What a fresh process finds out about this installation when the doctor asks (``doctor_interview``)."""

from __future__ import annotations

import importlib
import json
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

from slipstream.compilation.doctor_interview import Answer
from slipstream.compilation.hooks import installed
from slipstream.compilation.safety import HAZARDS, install, report, verify

HAZARD_NAMES = tuple(hazard.name for hazard in HAZARDS)
PACKAGE_QUESTIONS = ("torch", "gpus", "compile", "triton", "fla", "transformers")
INSTALLED_QUESTIONS = (*HAZARD_NAMES, "verify")


def one_line(error: BaseException) -> str:
    """Return the error's kind and text as one line of at most 300 characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300].removesuffix(":")


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
