"""Time from the start of a process to its first finished training step: cold, and after ``slipstream prewarm``.

    python benchmarks/cold_start.py recipe.toml [--rounds 2] [--section.key value ...]

Every process has empty directories for inductor's and Triton's code; what the target and the data need (downloads,
conversions, packed rows) is there for both, and so are Python's byte code and the system's file cache. Cold and
prewarmed take turns. A process is ended after its first step. Prints one line a process, the moments between, and the
ratio of the best of each.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from slipstream.compilation.bundle import directory

MOMENTS = {  # what is printed when a part is done
    "target and data": "compile bundle ",
    "target, data, reader": "drafter: ",
    "preflight": "preflight empty-batch",
    "first step": "step 1",
}


def start(arguments: list[str], root: Path, name: str) -> tuple[subprocess.Popen[str], float]:
    """Start ``slipstream`` with cold caches of compiled code below ``root``; return the process and its start."""
    caches = {"TORCHINDUCTOR_CACHE_DIR": root / name / "inductor", "TRITON_CACHE_DIR": root / name / "triton"}
    environment = {
        **os.environ,
        "PYTHONPYCACHEPREFIX": str(root / "bytecode"),  # libraries may lie where it cannot be written beside them
        **{key: str(value) for key, value in caches.items()},
    }
    began = time.monotonic()
    command = [sys.executable, "-u", "-m", "slipstream", *arguments]
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True
    )
    return process, began


def to_first_step(arguments: list[str], root: Path, name: str) -> dict[str, float]:
    """Train until the first step is done; return seconds since the start of the process by moment."""
    process, began = start(["train", *arguments, "--run.directory", str(root / name / "run")], root, name)
    seen: dict[str, float] = {}
    told = []
    assert process.stdout is not None
    for line in process.stdout:
        told.append(line)
        for moment, words in MOMENTS.items():
            if line.startswith(words):
                seen.setdefault(moment, time.monotonic() - began)
        if "graphs found" in line:
            print(line.strip())
        if "first step" in seen:
            process.kill()
            break
    process.stdout.close()
    process.wait()
    if "first step" not in seen:
        sys.exit("".join(told[-30:]) + "\nthe process ended before its first step")
    return seen


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--rounds", type=int, default=2)
    args, settings = parser.parse_known_args()
    root = Path(tempfile.mkdtemp(prefix="cold-start-"))
    os.environ.setdefault("SLIPSTREAM_CACHE", str(root / "slipstream"))
    always = [args.recipe, *settings, "--training.log-every", "1", "--training.evaluate-every", "0"]
    made, began = start(["prewarm", *always, "--run.directory", str(root / "none")], root, "prewarm")
    out, _ = made.communicate()
    if made.returncode:
        sys.exit(out + f"\nprewarm ended with exit code {made.returncode}")
    print(f"prewarm: {time.monotonic() - began:.1f} s; {out.strip().splitlines()[-1]}")
    bundles = directory()
    aside = bundles.with_name("compiled-aside")
    results: dict[str, list[dict[str, float]]] = {"cold": [], "prewarmed": []}
    for number in range(args.rounds):
        for kind, into in results.items():
            if kind == "cold" and bundles.exists():
                bundles.rename(aside)
            try:
                into.append(to_first_step(always, root, f"{kind}-{number}"))
            finally:
                if aside.exists():
                    shutil.rmtree(bundles, ignore_errors=True)
                    aside.rename(bundles)
            print(f"{kind}: " + ", ".join(f"{name} {at:.1f} s" for name, at in into[-1].items()), flush=True)
    best = {kind: min(seen["first step"] for seen in runs) for kind, runs in results.items()}
    ratio = best["prewarmed"] / best["cold"]
    print(f"first step: cold {best['cold']:.1f} s, prewarmed {best['prewarmed']:.1f} s, ratio {ratio:.2f}")
    print(json.dumps({"runs": results, "ratio": ratio}))
    shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
