"""What the doctor's findings mean: what will bite, and what is worth knowing, each with what to do about it.

``judge`` works on the facts alone, so that every case can be tried on a machine that has none of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

GIB = 2**30
LEAST_FREE = 2 * GIB
# What a container gets unless it is told otherwise; too small for several GPUs.
SMALL_SHARED_MEMORY = 64 * 2**20
REPORT = "report it with the output of `slipstream doctor --json`"
PATCHES = "look for other patches of torch, Triton or FLA here (sitecustomize, .pth files), and remove them"

Finding = dict[str, str]
Found = Iterator[tuple[bool, str, str]]


def judge(facts: dict[str, Any]) -> tuple[list[Finding], list[Finding]]:
    """Return (problems, notes): each ``{"what", "cure"}``, a line each. A problem will bite; a note will not.

    ``facts``: what ``doctor.examine`` found. What follows from a cause that is told is not told again. Pure.
    """
    problems: list[Finding] = []
    notes: list[Finding] = []
    rules = [_packages, _environment]
    if _usable(facts["packages"]["torch"]):  # without torch there is nothing to say of what it would do
        rules += [_gpus, _compile, _hazards, _compiler]
    for rule in (*rules, _places, _shared_memory):
        for bites, what, cure in rule(facts):
            (problems if bites else notes).append({"what": " ".join(what.split()), "cure": cure})
    return problems, notes


def _usable(package: dict[str, Any]) -> bool:
    return package["version"] is not None and not package["failed"]


def _cuda(facts: dict[str, Any]) -> str | None:
    """Return the CUDA version that torch was built for; None for a CPU build."""
    found: str | None = facts["packages"]["torch"].get("cuda")
    return found


def _packages(facts: dict[str, Any]) -> Found:
    packages = facts["packages"]
    for name in ("torch", "transformers"):
        if packages[name]["failed"]:
            yield True, f"{name} cannot be imported: {packages[name]['failed']}", f"reinstall it: pip install -U {name}"
        elif packages[name]["version"] is None:
            yield True, f"{name} is not installed", f"pip install {name}"
    triton, cuda = packages["triton"], _cuda(facts) is not None
    wanted = triton["wanted"]
    right = f"pip install triton=={wanted}" if wanted else "install the triton that this torch asks for"
    if triton["failed"]:
        cure = f"{right}" if cuda else "nothing needs it beside a CPU build of torch: pip uninstall triton"
        yield cuda, f"triton cannot be imported: {triton['failed']}", cure
    elif triton["version"] is None and cuda:
        yield True, "triton is not installed, and torch is built for CUDA: no kernel can be compiled", right
    elif triton["version"] and wanted and triton["version"].partition("+")[0] != wanted:
        yield False, f"torch asks for triton {wanted}, and {triton['version']} is installed", right
    without = triton["failed"] or (cuda and triton["version"] is None)  # told above; FLA is built on it
    for name in ("flash-linear-attention", "fla-core"):
        if packages[name]["failed"] and not without:
            cure = f"reinstall it: pip install -U {name}, or pip uninstall {name}"
            yield cuda, f"{name} cannot be imported: {packages[name]['failed']}", cure


def _gpus(facts: dict[str, Any]) -> Found:
    cuda = _cuda(facts)
    hidden = any(row["name"] == "CUDA_VISIBLE_DEVICES" and row["level"] for row in facts["environment"])
    if cuda and not facts["gpus"] and facts["driver"] and not hidden:
        why = facts["no_gpu"] or "CUDA names no device"
        cure = f"use a driver for CUDA {cuda}, or a torch for an older CUDA; give a container its GPUs (--gpus all)"
        yield True, f"torch, built for CUDA {cuda}, sees no GPU: {why}", cure
    elif cuda and not facts["gpus"] and not hidden:
        cure = "on a machine with GPUs install the NVIDIA driver, or give the container its GPUs (--gpus all)"
        yield False, "there is no NVIDIA driver: this torch, built for CUDA, runs on the CPU only", cure
    for gpu in facts["gpus"]:
        if gpu["failed"]:
            cure = "free it, or leave it out with CUDA_VISIBLE_DEVICES"
            yield True, f"GPU {gpu['index']} ({gpu['name']}) cannot be used: {gpu['failed']}", cure
    peers = facts["peers"]
    apart = [(a, b) for a in range(len(peers)) for b in range(a) if not (peers[a][b] and peers[b][a])]
    if apart:
        more = f" (and between {len(apart) - 1} other pairs)" if len(apart) > 1 else ""
        what = f"GPU {apart[0][1]} and GPU {apart[0][0]} cannot reach each other's memory{more}: copies go by the host"
        yield False, what, "nothing, where the machine has no link between them; else look at `nvidia-smi topo -p2p r`"


def _environment(facts: dict[str, Any]) -> Found:
    for row in facts["environment"]:
        if row["level"]:
            yield row["level"] == "bites", f"{row['name']}={row['value']}: {row['effect']}", row["cure"]


def _compile(facts: dict[str, Any]) -> Found:
    told = any(row["level"] == "bites" and row["name"].endswith("_DISABLE") for row in facts["environment"])
    if facts["compile"]["failed"]:
        cure = "use versions of torch and Python that go together"
        yield True, f"torch.compile fails: {facts['compile']['failed']}", cure
    elif not facts["compile"]["compiled"] and not told:
        cure = "look for what switches it off: TORCHDYNAMO_DISABLE, TORCH_COMPILE_DISABLE, or a patch of torch"
        yield True, "torch.compile compiles nothing: it calls the plain function", cure


def _hazards(facts: dict[str, Any]) -> Found:
    packages = facts["packages"]
    broken = {name for name, package in packages.items() if package["failed"]}
    broken |= {"fla"} if broken & {"flash-linear-attention", "fla-core"} else set()
    told = False
    for hazard in facts["hazards"]:
        name = hazard["name"]
        if hazard["held"] or hazard["package"] in broken:
            continue
        told = True
        if hazard["installed"] == "unknown":
            what = f"{name} is not handled: {hazard['what']} ({hazard['installed_detail']})"
            cure = "use versions of torch, Triton and FLA that are supported, or compile in one thread only"
            yield True, what, cure
        elif hazard["seen"]:
            yield True, f"{name} is seen in spite of install(): {hazard['seen']}", PATCHES
        else:
            why = hazard["installed_detail"] or hazard["installed"]
            yield True, f"{name} is not known to be handled: {why}", REPORT
    if not facts["verify"]["held"] and not told and not broken:
        yield True, f"verify() does not hold: {facts['verify']['detail']}", PATCHES


def _compiler(facts: dict[str, Any]) -> Found:
    if _cuda(facts) is None or not _usable(facts["packages"]["triton"]):
        return
    found = facts["compiler"]
    if found["path"] is None:
        what = f"no C compiler: {found['command']} is not there, and Triton builds its launchers with one"
        yield True, what, "install gcc, or set CC to a compiler"
    if found["headers"] is None:
        what = "Python.h is not there, and Triton's launchers are built with it"
        yield True, what, "install Python's headers (python3-dev, or python3-devel)"


def _label(place: dict[str, Any]) -> str:
    return "the working directory" if not place["variable"] else f"the {place['name']} cache"


def _places(facts: dict[str, Any]) -> Found:
    places = [*facts["caches"], facts["working_directory"]]
    full: dict[int, list[dict[str, Any]]] = {}
    for place in places:
        move = f"set {place['variable']} to" if place["variable"] else "cd to"
        if not place["writable"]:
            cure = f"{move} a directory that can be written"
            yield True, f"{_label(place)} {place['path']}: {place['why_not']}", cure
            continue  # the disk under it is not the one that will be used
        if not place["executable"] and place["name"] in ("inductor", "Triton"):
            what = f"{_label(place)} {place['path']} is mounted noexec: what is compiled there cannot be loaded"
            yield _cuda(facts) is not None, what, f"{move} a directory on another disk"
        if place["free_bytes"] < LEAST_FREE:
            full.setdefault(place["filesystem"], []).append(place)
    for group in full.values():
        names = " and ".join(_label(place) for place in group)
        what = f"only {group[0]['free_bytes'] / GIB:.1f} GiB free for {names} ({group[0]['path']})"
        variables = [place["variable"] for place in group if place["variable"]]
        other = f"set {' and '.join(variables)} to another disk" if variables else "work on another disk"
        yield True, what, f"free {LEAST_FREE // GIB} GiB there, or {other}"


def _shared_memory(facts: dict[str, Any]) -> Found:
    found = facts["shared_memory"]
    if found is not None and len(facts["gpus"]) > 1 and found["total_bytes"] <= SMALL_SHARED_MEMORY:
        what = f"{found['path']} has {found['total_bytes'] / 2**20:.0f} MiB: GPUs that share work by NCCL need more"
        yield True, what, "start the container with --shm-size=8g, or with --ipc=host"
