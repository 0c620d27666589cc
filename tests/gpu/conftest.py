"""Each GPU test starts with an empty compiler: the recompile limit of one process is not shared among tests."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    import torch

    torch._dynamo.reset()
