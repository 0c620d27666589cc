"""Tests that need hardware which this machine lacks are deselected, and the header says so."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path

import pytest

# The user's own cache stays untouched by tests, and tests never reach for the network.
_CACHE = os.environ["SLIPSTREAM_CACHE"] = tempfile.mkdtemp(prefix="slipstream-test-cache-")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def _remove_cache(owner: int = os.getpid()) -> None:
    if os.getpid() == owner:  # not at the end of a forked child, while the tests go on
        shutil.rmtree(_CACHE, ignore_errors=True)


atexit.register(_remove_cache)


def gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def pytest_report_header(config: pytest.Config) -> str:
    return f"GPUs: {gpus()} (tests marked gpu need 1, multi_gpu 2; without them they are deselected)"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    have = gpus()
    lacking = {name for name, needed in {"gpu": 1, "multi_gpu": 2}.items() if have < needed}
    gone = [item for item in items if lacking & {mark.name for mark in item.iter_markers()}]
    if gone:
        config.hook.pytest_deselected(items=gone)
        items[:] = [item for item in items if item not in gone]


@pytest.fixture(autouse=True)
def _working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test runs in a directory of its own, so that a relative path cannot touch the checkout."""
    monkeypatch.chdir(tmp_path)
