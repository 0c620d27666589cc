"""Who trains: this process or several; which failure is told. Real processes are in tests/integration/test_ranks.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.config import Recipe, RunConfig, TopologyConfig, TrainingConfig
from slipstream.errors import ConfigError, TrainingError
from slipstream.training import start as module


def recipe(directory: Path, **topology: Any) -> Recipe:
    return Recipe(
        run=RunConfig(directory=str(directory), device="cpu"),
        topology=TopologyConfig(**topology),
        training=TrainingConfig(accumulation=2),
    )


def failure(exitcode: int, said: str | None, timestamp: int) -> Any:
    data = {} if said is None else {"message": {"message": said, "extraInfo": {"py_callstack": f"Traceback\n{said}\n"}}}
    return SimpleNamespace(error_file_data=data, exitcode=exitcode, timestamp=timestamp, pid=7, message="Signal 9")


@pytest.mark.parametrize(
    ("failures", "code", "told"),
    [
        ({0: failure(2, "PeerError: gone", 1), 1: failure(-9, None, 5)}, 1, "rank 1 (process 7) ended: Signal 9"),
        ({0: failure(2, "PeerError: gone", 1), 1: failure(2, "TargetError: no\nsuch", 5)}, 2, "slipstream: no\nsuch"),
        ({0: failure(1, "ValueError: late", 9), 1: failure(1, "ValueError: early", 8)}, 1, "failed with ValueError"),
        ({0: failure(-9, None, 40), 1: failure(1, "ValueError: early", 8)}, 1, "failed with ValueError"),
        ({0: failure(-9, None, 8), 1: failure(130, "KeyboardInterrupt: ", 7)}, 1, "rank 0 (process 7) ended"),
        ({1: failure(2, "PeerError: another rank cannot be reached", 1)}, 2, "another rank cannot be reached"),
    ],
)  # fmt: skip
def test_causes_are_told_before_consequences(
    failures: dict[int, Any], code: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    error: Any = SimpleNamespace(failures=failures)
    assert module._tell(error) == code
    said = capsys.readouterr().err
    assert told in said
    assert "late" not in said


def test_a_spread_target_is_refused_until_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    given = recipe(tmp_path, targets=("cuda:0+cuda:1",), drafters=("cuda:2",))
    given = replace(given, run=replace(given.run, device="auto"))
    with pytest.raises(ConfigError, match=r"cuda:0\+cuda:1: .* cannot run one yet"):
        module._topology(given, 1)
    topology = module._topology(replace(given, topology=TopologyConfig()), 1)
    assert topology.devices == ("cuda:0",)  # a split that nobody has asked for is not taken yet


def test_ranks_that_start_again_need_something_to_go_on_from(tmp_path: Path) -> None:
    given = recipe(tmp_path / "run")
    assert module._again(given, False) is False  # nothing was begun
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}", encoding="utf-8")
    with pytest.raises(TrainingError, match="no checkpoint to go on from"):
        module._again(given, False)
