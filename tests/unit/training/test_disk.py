"""The room that a run asks for before it starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.config import TrainingConfig
from slipstream.errors import TrainingError
from slipstream.training.disk import require_room
from slipstream.training.optimizer import state_bytes


@pytest.mark.parametrize(("optimizer", "size"), [("adamw", "16.0 MiB"), ("muon", "12.0 MiB")])
def test_room_for_a_checkpoint_and_the_drafter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str, size: str
):
    state = state_bytes([(2**10, 2**10)], TrainingConfig(optimizer=optimizer))
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("U", (), {"free": 2**20})())
    with pytest.raises(TrainingError, match=rf"needs {size} for a checkpoint and the drafter, but 1\.0 MiB"):
        require_room(tmp_path / "run", 2**20, state)
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("U", (), {"free": 2**30})())
    require_room(tmp_path / "run", 2**20, state)
