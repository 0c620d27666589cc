"""Steps from epochs; what a resume is told and refused; facts that a target must name."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from slipstream.config import TrainingConfig
from slipstream.errors import CheckpointError, DrafterError
from slipstream.target.description import describe_target
from slipstream.training.session import FREE_SETTINGS, binding_settings, resolve_drafter, resolve_steps
from support.tiny_run import make_inputs, quiet_train, tiny_recipe


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


def test_settings_that_nothing_reads_do_not_bind():
    every = {f.name for f in dataclasses.fields(TrainingConfig)} - FREE_SETTINGS
    most = set(binding_settings(TrainingConfig(optimizer="muon", labels="soft", short_blocks=0.5)))
    assert every == most
    unread = {"muon_learning_rate", "muon_momentum", "soft_share", "short_blocks"}
    assert most - set(binding_settings(TrainingConfig())) == unread


def test_a_resume_elsewhere_is_warned_of_in_one_line_and_other_rows_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    make_inputs(tmp_path)
    recipe = tiny_recipe(tmp_path, tmp_path / "run", training__steps=1)
    quiet_train(recipe)
    assert "warning" not in quiet_train(recipe, resume=True)[1]
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    record["versions"]["torch"] = "1.0"
    record["threads"] = 999
    (tmp_path / "run" / "run.json").write_text(json.dumps(record))
    told = [line for line in quiet_train(recipe, resume=True)[1].splitlines() if line.startswith("warning")]
    assert len(told) == 1
    assert "torch 1.0 -> " in told[0]
    assert "threads 999 -> 1" in told[0]
    assert "to the bit" in told[0]

    from slipstream.data import cache, fit

    # Another version renders other rows under the same key.
    monkeypatch.setattr(cache, "code_digest", lambda: "another version")
    monkeypatch.setattr(fit, "best_fit", lambda lengths, room: [[i] for i in range(len(lengths))])
    with pytest.raises(CheckpointError, match=r"was made with data\.rows .*other rows.*transformers") as caught:
        quiet_train(recipe, resume=True)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_theta": 0.0}, r"names no rope_theta.*set drafter\.rope_theta"),
        ({"max_positions": 0}, r"names no max_position_embeddings.*config\.json"),
    ],
)
def test_what_the_target_does_not_name_is_asked_for(tmp_path: Path, change: dict, message: str):
    make_inputs(tmp_path)
    recipe = tiny_recipe(tmp_path, tmp_path / "run")
    info, tokenizer, _ = describe_target(recipe.target)
    assert resolve_drafter(recipe, tokenizer, info, frozenset()).rope_theta == 10000.0
    info = dataclasses.replace(info, **change)
    with pytest.raises(DrafterError, match=message) as caught:
        resolve_drafter(recipe, tokenizer, info, frozenset())
    assert info.name in str(caught.value)
    assert "\n" not in str(caught.value)
    if "rope_theta" in change:
        given = tiny_recipe(tmp_path, tmp_path / "run", drafter__rope_theta=5000.0)
        assert resolve_drafter(given, tokenizer, info, frozenset()).rope_theta == 5000.0
