"""What tests/conftest.py itself leaves behind."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).resolve().parents[1] / "conftest.py"
# A forked child that ends as a process of its own does must leave the cache to the tests that go on.
TESTS = """
import os
import sys
from pathlib import Path

def test_one():
    Path(os.environ["SLIPSTREAM_CACHE"], "file").touch()

def test_two():
    child = os.fork()
    if not child:
        import atexit
        atexit._run_exitfuncs()
        os._exit(0)
    os.waitpid(child, 0)
    assert Path(os.environ["SLIPSTREAM_CACHE"]).is_dir()
"""


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["alone", "xdist"])
def test_the_cache_of_the_tests_is_removed_at_the_end(tmp_path: Path, workers: tuple[str, ...]) -> None:
    if workers:
        pytest.importorskip("xdist")
    room, temporary = tmp_path / "room", tmp_path / "temporary"
    room.mkdir()
    temporary.mkdir()
    shutil.copy(CONFTEST, room)
    (room / "test_sample.py").write_text(TESTS, encoding="utf-8")
    # The header asks torch for GPUs, and loading the real one takes seconds in each process.
    (room / "torch.py").write_text("class cuda:\n    is_available = staticmethod(lambda: False)\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *workers, str(room)],
        env={**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": str(room)},
        cwd=room, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout
    assert not list(temporary.glob("slipstream-test-cache-*"))
