"""Prewarming on a GPU: another process, with cold caches, finds every graph and times no kernel again."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from support.tiny_run import command, make_inputs, overrides

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

PROGRAM = """
    import sys, time
    from rich.console import Console
    from slipstream.preflight.runner import cheap_checks
    from slipstream.prewarm import prewarm
    from slipstream.recipe import load_recipe
    from slipstream.training.trainer import train
    recipe, console = load_recipe(None, sys.argv[2:]), Console(width=300, highlight=False)
    began = time.monotonic()
    if sys.argv[1] == "prewarm":
        prewarm(recipe, console=console, preflight=cheap_checks(console))
    else:
        train(recipe, console=console, preflight=cheap_checks(console))
    print(f"{sys.argv[1]} took {time.monotonic() - began:.1f} s")
"""


def started(what: str, root: Path, caches: str, **changes: Any) -> subprocess.Popen[str]:
    settings = {"run__device": "cuda", "training__precision": "bfloat16", "target__dtype": "bfloat16", **changes}
    _, environment = command([])
    environment |= {
        "SLIPSTREAM_CACHE": str(root / "slipstream"),
        "TORCHINDUCTOR_CACHE_DIR": str(root / caches / "inductor"),
        "TRITON_CACHE_DIR": str(root / caches / "triton"),
    }
    arguments = overrides(root, root / f"run-{caches}", training__steps=2, **settings)
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), what, *arguments],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finished(process: subprocess.Popen[str]) -> str:
    out, _ = process.communicate(timeout=500)
    print(out)
    assert process.returncode == 0, out
    return out


def test_a_run_with_cold_caches_finds_everything_that_was_prewarmed(tmp_path: Path):
    make_inputs(tmp_path)
    assert "graphs, " in finished(started("prewarm", tmp_path, "first"))
    told = finished(started("train", tmp_path, "second"))
    (line,) = [line for line in told.splitlines() if "graphs found" in line]
    assert " 0 compiled anew" in line
    assert " 0 graphs found" not in line
    cold = finished(started("train", tmp_path, "third", training__anchors=16))  # another shape: no bundle
    assert "graphs found" not in cold


def test_two_that_prewarm_at_once_leave_a_whole_bundle(tmp_path: Path):
    make_inputs(tmp_path)
    both = [started("prewarm", tmp_path, caches) for caches in ("one", "two")]
    for process in both:
        finished(process)
    told = finished(started("train", tmp_path, "three"))
    assert " 0 compiled anew" in told
