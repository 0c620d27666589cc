"""Fresh processes: what these tests change, they change for a whole process."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[3] / "src"
FLA = Path(sys.prefix) / "fla"  # make install puts it there


@pytest.fixture
def fresh(tmp_path: Path) -> Callable[..., str]:
    """Return ``fresh(code) -> str``: run code in a new interpreter and return the last line that it printed.

    A code that fails fails the test, with what it said.
    """

    def run(code: str, **environment: str) -> str:
        assert FLA.is_dir(), f"{FLA} is missing: run make install"
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            env={**os.environ, "PYTHONPATH": f"{SOURCE}{os.pathsep}{FLA}", "PYTHONWARNINGS": "ignore", **environment},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        lines = done.stdout.strip().splitlines()
        return lines[-1] if lines else ""

    return run
