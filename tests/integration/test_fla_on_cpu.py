"""FLA's own package beside transformers, on a CPU: a hybrid target can be read all the same."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

FLA = Path(sys.prefix) / "fla"  # make install puts it there
TESTS = Path(__file__).parents[1]
READ = """
import sys
from pathlib import Path
import torch
from slipstream.config import TargetConfig
from slipstream.target.features import FeatureReader
from slipstream.target.model import load_target
from support.tiny import save_tiny_target
directory = save_tiny_target(Path(sys.argv[1]) / "target", "qwen3_5")
target = load_target(TargetConfig(path=str(directory)), device=torch.device("cpu"), dtype=torch.float32)
import fla
print(FeatureReader(target, (0, 3, 6)).packing)
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.skipif(not FLA.is_dir() and find_spec("fla") is None, reason="FLA is not installed")
def test_a_hybrid_target_is_read_with_fla_installed(tmp_path: Path) -> None:
    paths = [str(TESTS), *([str(FLA)] if FLA.is_dir() else []), os.environ.get("PYTHONPATH", "")]
    child = subprocess.run(
        [sys.executable, "-c", READ, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
    )
    assert child.returncode == 0, child.stderr[-2000:]
    assert child.stdout.strip() == "packed, recurrent layers by documents"
    assert "not by the kernels of fla" in child.stderr
