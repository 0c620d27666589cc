"""Steps from epochs."""

from __future__ import annotations

import pytest

from slipstream.config import TrainingConfig
from slipstream.training.session import resolve_steps


@pytest.mark.parametrize(
    ("settings", "rows", "expected"),
    [
        ({"steps": 7, "epochs": 3.0}, 100, 7),
        ({"epochs": 3.0}, 100, 300),
        ({"epochs": 1.0, "rows": 3, "accumulation": 2}, 100, 17),
        ({"epochs": 0.001}, 100, 1),
        ({"epochs": 0.0, "max_minutes": 1.0}, 100, None),
    ],
)
def test_steps(settings: dict, rows: int, expected: int | None):
    assert resolve_steps(TrainingConfig(**settings), rows) == expected
