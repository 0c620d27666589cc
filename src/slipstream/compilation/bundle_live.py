"""Bundles and the running process: what was compiled and tuned here goes into one, what one holds is used here.

Loading is help, never a condition: whatever is wrong with a bundle or a cache directory is said in one line, and the
run goes on and compiles for itself.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.compilation import triton_kernels, tuning_results
from slipstream.compilation.bundle import (
    SUFFIX,
    Bundle,
    DamagedBundle,
    directory,
    file_name,
    read_bundle,
    read_header,
    set_aside,
    write_bundle,
)
from slipstream.compilation.doctor_places import cache_places, look_at, why_unusable
from slipstream.compilation.fingerprint import Fields, differences, digest, environment
from slipstream.compilation.locks import new_lock

Say = Callable[[str], None]

TORCH, TUNING, KERNELS = "torch", "tuning", "triton"
_LEAST_ROOM = 64 << 20  # bytes that compiling may need; a disk with less counts as full

_lock = new_lock()
_loaded: list[_Loaded] = []


@dataclass(frozen=True)
class _Loaded:
    """A bundle that was loaded and not yet reported on. ``before``: torch's counters and Triton's at that time."""

    name: str
    results: int
    before: tuple[int, int, int | None]


# -- out of this process ----------------------------------------------------------------------------------------------


def save(
    work: Fields, device: Any, about: Fields | None = None, kernels: Mapping[str, Any] | None = None
) -> tuple[Path, Bundle] | None:
    """Write what this process has compiled and tuned so far as the bundle of ``work`` on ``device``.

    ``kernels``: those of Triton's that a step launches, by hash (``triton_kernels.launched``). Returns its path and
    the bundle; None, and writes nothing, where nothing was compiled or tuned. Raises CompilationError where it cannot
    be written. No other thread may compile meanwhile.
    """
    import torch

    saved = torch.compiler.save_cache_artifacts()
    results = tuning_results.collect()
    if saved is None and not results:
        return None
    graphs = 0 if saved is None else len(saved[1].inductor_artifacts)
    binaries = triton_kernels.collect(kernels or {})
    bundle = Bundle(
        environment=environment(device),
        work=work,
        about={**(about or {}), "graphs": graphs, "tuning results": len(results), "kernels": len(binaries)},
        sections={
            TORCH: b"" if saved is None else saved[0],
            TUNING: tuning_results.encode(results),
            KERNELS: triton_kernels.encode(binaries),
        },
    )
    return write_bundle(directory(), bundle), bundle


# -- into this process ------------------------------------------------------------------------------------------------


def load_for_run(work: Fields, device: Any, *, say: Say) -> bool:
    """Load the bundle of a run, if there is one; say in one line each what was loaded, refused or is damaged.

    To be called before anything is compiled or tuned. Does nothing on a CPU, where nothing is. Never raises for a
    bundle or a directory that is of no use. Returns whether a bundle was loaded.
    """
    if device.type != "cuda":
        return False
    settle_caches(say)
    return load(work, device, say=say)


def load(work: Fields, device: Any, *, say: Say) -> bool:
    """Load the bundle of ``work`` on ``device``; see ``load_for_run``. A missing one is not spoken of.

    A bundle that holds the same work, but was made elsewhere, is refused with the fields that differ.
    """
    here = environment(device)
    path = directory() / file_name(here, work)
    try:
        bundle = read_bundle(path)
    except FileNotFoundError:
        _refuse_made_elsewhere(here, work, say)
        return False
    except DamagedBundle as damage:
        aside = set_aside(path)
        kept = f"set aside as {aside.name}" if aside is not None else "it could not be set aside"
        say(f"warning: the compile bundle {path} is damaged: {damage}; {kept}; kernels are compiled anew")
        return False
    except OSError as error:
        say(f"warning: the compile bundle {path} cannot be read ({error.strerror or error}); kernels are compiled anew")
        return False
    if wrong := differences({**here, **work}, {**bundle.environment, **bundle.work}):  # renamed by hand
        say(_refusal(path, wrong))
        return False
    return _take_up(path, bundle, say)


def _refusal(path: Path, wrong: list[str]) -> str:
    return (
        f"warning: the compile bundle {path} was made elsewhere and is refused: {'; '.join(wrong)}; kernels are "
        "compiled anew, or make one here with `slipstream prewarm`"
    )


def _refuse_made_elsewhere(here: Fields, work: Fields, say: Say) -> None:
    """Speak of the newest bundle for the same work that another environment made."""
    found: list[tuple[str, Path, Bundle]] = []
    for path in directory().glob(f"{digest(work)}-*{SUFFIX}"):
        try:
            head = read_header(path)
        except (OSError, DamagedBundle):
            continue
        found.append((head.created, path, head))
    if found:
        _, path, head = max(found, key=lambda entry: entry[0])
        say(_refusal(path, differences(here, head.environment)))


def _take_up(path: Path, bundle: Bundle, say: Say) -> bool:
    import torch

    # What torch raises of a cache directory or an artifact that it cannot use is not written down anywhere.
    try:
        results = tuning_results.decode(bundle.sections.get(TUNING, b"[]"))
        kernels = triton_kernels.decode(bundle.sections.get(KERNELS, b""))
        # What may fail comes first, so that a bundle which is told to be of no use has not been taken up in part.
        put = _put_kernels(kernels)
        content = bundle.sections.get(TORCH, b"")
        if content and torch.compiler.load_cache_artifacts(content) is None:
            raise ValueError("torch cannot read its artifacts")
        tuning_results.restore(results)
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        say(f"warning: the compile bundle {path} could not be loaded ({reason}); kernels are compiled anew")
        return False
    triton_kernels.count_compiled()
    with _lock:
        _loaded[:] = [_Loaded(path.name, len(results), _counts())]
    say(
        f"compile bundle {path.name} of {bundle.created}: {bundle.about.get('graphs', 0)} graphs, "
        f"{len(results)} tuning results, {put}"
    )
    return True


def graph_counts() -> tuple[int, int]:
    """Return how many graphs torch has found in its caches in this process, and how many it has compiled."""
    from torch._dynamo.utils import counters

    graphs = counters["inductor"]
    return graphs["fxgraph_cache_hit"], graphs["fxgraph_cache_miss"] + graphs["fxgraph_cache_bypass"]


def _put_kernels(kernels: Mapping[str, triton_kernels.Files]) -> str:
    """Put kernels into Triton's cache; return what is to be said of them. Without them the rest is of use as well."""
    try:
        triton_kernels.restore(kernels)
    except (OSError, RuntimeError, ImportError) as error:
        why = getattr(error, "strerror", None) or " ".join(str(error).split())
        return f"without its {len(kernels)} Triton kernels, which cannot be put into Triton's cache ({why})"
    return f"{len(kernels)} Triton kernels"


def _counts() -> tuple[int, int, int | None]:
    return *graph_counts(), triton_kernels.compiled()


def first_step_report() -> str | None:
    """Return, once after a bundle was loaded, a line of what it spared; otherwise None. For after the first step.

    Thread-safe, and cheap enough for every step.
    """
    if not _loaded:
        return None
    with _lock:
        if not _loaded:
            return None
        loaded = _loaded.pop()
    now = _counts()
    hits, misses = now[0] - loaded.before[0], now[1] - loaded.before[1]
    kernels = "Triton kernels are not counted: another listener took the place of the one that does"
    if now[2] is not None and loaded.before[2] is not None:
        kernels = f"{now[2] - loaded.before[2]} Triton kernels compiled anew"
    return (
        f"compile bundle {loaded.name}: {hits} graphs found, {misses} compiled anew; {tuning_results.restored()} of "
        f"{loaded.results} tuning results used; {kernels}"
    )


# -- directories ------------------------------------------------------------------------------------------------------


def settle_caches(say: Say) -> None:
    """Where torch's or Triton's cache cannot be written, let this process keep what it compiles elsewhere.

    Otherwise the first compilation would fail. Directories that the user has set and that can be written stay. Says so
    in one line.
    """
    unusable = []
    for name, path, variable in cache_places(directory())[:2]:
        if why := why_unusable(path, variable) or _no_room(path):
            unusable.append((name, path, variable, why))
    if not unusable:
        return
    told = " and ".join(f"{name}'s cache {path} cannot be used ({why})" for name, path, _, why in unusable)
    names = " and ".join(variable for _, _, variable, _ in unusable)
    place = _other_place()
    if place is None:
        say(f"warning: {told}, and there is no other place with room; make room, or set {names} to a directory")
        return
    for name, _, variable, _ in unusable:
        os.environ[variable] = str(place / name)
    say(f"warning: {told}; this process compiles into {place}, which goes when it ends; set {names} to keep it")


def _no_room(path: Path) -> str:
    """Return how little room there is for compiled code; nothing where there is enough."""
    try:
        free = look_at("", path, "", count=False)["free_bytes"]
    except OSError as error:
        return error.strerror or str(error)
    return f"{free >> 20} MiB free" if free < _LEAST_ROOM else ""


def _other_place() -> Path | None:
    """Make a directory with room that goes when the process ends."""
    for candidate in (Path(tempfile.gettempdir()), directory().parent, Path("/dev/shm")):
        if candidate.is_dir() and not (why_unusable(candidate, "") or _no_room(candidate)):
            place = Path(tempfile.mkdtemp(prefix="slipstream-compile-", dir=candidate))
            atexit.register(_remove, place, os.getpid())
            return place
    return None


def _remove(place: Path, process: int) -> None:
    if os.getpid() == process:  # not in a child that was forked
        shutil.rmtree(place, ignore_errors=True)
