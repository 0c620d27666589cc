"""Tiny runs, prepared once for each family and shape. The checks leave them as they were."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from slipstream.config import DataConfig, DrafterSettings, Recipe, RunConfig, TargetConfig, TrainingConfig
from slipstream.preflight import run_checks
from slipstream.training.session import PreparedRun, prepare
from support.tiny import save_tiny_target, write_conversations

Prepared = Callable[..., PreparedRun]


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """Return ``prepared(family, dtype=, training=, **drafter settings) -> PreparedRun`` on the CPU, two-turn chats.

    ``training``: settings of the optimisation, by name.
    """
    room = tmp_path_factory.mktemp("preflight")
    data = write_conversations(room / "train.jsonl", 8, turns=2)
    targets: dict[str, Path] = {}
    runs: dict[tuple[Any, ...], PreparedRun] = {}

    def get(
        family: str = "qwen3", *, dtype: str = "float32", training: Mapping[str, Any] | None = None, **settings: Any
    ) -> PreparedRun:
        training = training or {}
        key = (family, dtype, *sorted(training.items()), *sorted(settings.items()))
        if key not in runs:
            if family not in targets:
                targets[family] = save_tiny_target(room / family, family)
            recipe = Recipe(
                target=TargetConfig(path=str(targets[family]), dtype=dtype),
                data=DataConfig(train=(str(data),), row_length=160),
                drafter=DrafterSettings(**{"layers": 2, "block_size": 8, **settings}),
                training=TrainingConfig(precision="float32", **training),
                run=RunConfig(device="cpu", directory=str(room / "run")),
            )
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("SLIPSTREAM_CACHE", str(room / "cache"))
                runs[key] = prepare(recipe, say=lambda _: None)
        return runs[key]

    return get


@pytest.fixture
def run(prepared: Prepared) -> PreparedRun:
    """The tiny Qwen3 run."""
    return prepared()


Verdict = Callable[..., dict[str, str]]


@pytest.fixture
def verdict() -> Verdict:
    """Return ``verdict(run, *names) -> {name: detail}`` of the checks that failed."""

    def judge(run: PreparedRun, *names: str) -> dict[str, str]:
        report = run_checks(run, names)
        assert [r.name for r in report.results] == list(names)
        for result in report.results:
            assert "\n" not in result.line()
            assert result.detail
        return {r.name: r.detail for r in report.results if not r.passed}

    return judge


@pytest.fixture
def changed() -> Callable[..., PreparedRun]:
    """Return ``changed(run, **config fields) -> PreparedRun`` whose drafter's configuration says something else."""

    def change(run: PreparedRun, **fields: Any) -> PreparedRun:
        return dataclasses.replace(run, config=dataclasses.replace(run.config, **fields))

    return change
