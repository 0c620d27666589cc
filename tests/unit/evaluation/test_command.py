"""An evaluation that is not lossless, or of another target, ends with an error: the gates can fail."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from slipstream.errors import ConfigError, DecodingError, DrafterError, TargetError
from slipstream.evaluation.command import evaluate_path, refuse_lossy
from slipstream.evaluation.display import losslessness
from slipstream.evaluation.measure import require_same, table_documents
from slipstream.evaluation.record import output_path, trained_with
from slipstream.records import EvalResult


def result(*differences: dict[str, Any]) -> EvalResult:
    return EvalResult(
        tau=1.5,
        tau_per_response=1.5,
        acceptance_by_position=(0.5,),
        histogram=(1, 1),
        lossless_responses=4,
        lossless_equal=4 - len(differences),
        first_differences=differences,
        tokens_per_second=2.0,
        baseline_tokens_per_second=1.0,
        baselines={},
        prompts=4,
        generated_tokens=8,
        temperature=0.0,
        block_size=2,
        batch_size=4,
        max_new_tokens=4,
    )


def test_equal_responses_and_near_ties_pass() -> None:
    refuse_lossy(result())
    refuse_lossy(result({"prompt": 1, "position": 3, "near_tie": True}))


def test_any_other_difference_is_an_error_that_names_it() -> None:
    with pytest.raises(DecodingError, match=r"1 of 4 greedy responses .* token 3 of prompt 1"):
        refuse_lossy(result({"prompt": 0, "near_tie": True}, {"prompt": 1, "position": 3, "near_tie": False}))


def test_tables_are_counted_on_a_bounded_part_and_a_cut_is_said() -> None:
    documents = [(np.arange(n, dtype=np.int32), np.ones(n, bool)) for n in (4, 3, 5)]
    dataset: Any = SimpleNamespace(documents=lambda: iter(documents), report=SimpleNamespace(tokens=12))
    told = io.StringIO()
    console = Console(file=told, width=200)
    assert table_documents(dataset, console, limit=8) == [[0, 1, 2, 3], [0, 1, 2]]
    assert "first 7 of 12" in told.getvalue()
    assert [len(d) for d in table_documents(dataset, console, limit=12)] == [4, 3, 5]
    assert [len(d) for d in table_documents(dataset, console, limit=1)] == [4]


def test_what_is_said_about_losslessness() -> None:
    tie, lossy = {"prompt": 0, "near_tie": True}, {"prompt": 1, "near_tie": False}
    details = {"target_dtype": "bfloat16"}
    (line,) = losslessness(dataclasses.replace(result(), details=details))
    assert line == "lossless: 4 of 4 greedy responses equal plain decoding in bfloat16"
    (line,) = losslessness(dataclasses.replace(result(tie), details=details))
    assert line.startswith("lossless up to rounding: 3 of 4")
    first, second = losslessness(dataclasses.replace(result(tie, lossy), details=details))
    assert first.startswith("NOT lossless: 1 of 4")
    assert "'prompt': 1" in second
    (line,) = losslessness(dataclasses.replace(result(lossy), temperature=0.7))
    assert "greedy" not in line
    assert "temperature 0.7" in line


def test_another_target_or_template_is_refused() -> None:
    trained = {"target.digest": "a" * 64, "tokenizer.digest": "b" * 64}
    require_same(trained, trained, Path("run/drafter"), "t")
    require_same({}, trained, Path("run/drafter"), "t")
    for name, what in (("target.digest", "the target "), ("tokenizer.digest", "tokenizer or chat template")):
        with pytest.raises(TargetError, match=what):
            require_same(trained, {**trained, name: "c" * 64}, Path("run/drafter"), "t")


def test_a_run_tells_what_it_was_trained_with(tmp_path: Path) -> None:
    assert trained_with(tmp_path) is None
    digests = {"target.digest": "a", "tokenizer.digest": "b"}
    (tmp_path / "run.json").write_text(json.dumps({"identity": {**digests, "device": "cpu"}}))
    assert trained_with(tmp_path) == digests
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(ConfigError, match="does not tell which target"):
        trained_with(tmp_path)


def test_a_run_that_does_not_tell_its_target_is_spoken_of(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text('[target]\npath = "somewhere"\ndtype = "float32"\n')
    told = io.StringIO()
    with pytest.raises(DrafterError):  # it has no drafter either, which comes next
        evaluate_path(tmp_path, ["--run.device", "cpu"], console=Console(file=told, width=200))
    assert "no run.json: whether somewhere is the target it learned from is not known" in told.getvalue()


def test_other_settings_do_not_replace_an_evaluation(tmp_path: Path) -> None:
    assert output_path(tmp_path, overridden=True).name == "evaluation_2.json", (
        "also before there is one of the run's own"
    )
    (tmp_path / "evaluation.json").touch()
    assert output_path(tmp_path, overridden=True).name == "evaluation_2.json"
    (tmp_path / "evaluation_2.json").touch()
    assert output_path(tmp_path, overridden=True).name == "evaluation_3.json"
    assert output_path(tmp_path, overridden=False).name == "evaluation.json"
