"""An evaluation that is not lossless ends with an error: the gate can fail."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from slipstream.errors import DecodingError
from slipstream.evaluation import refuse_lossy, table_documents
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
