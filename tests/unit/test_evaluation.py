"""An evaluation that is not lossless ends with an error: the gate can fail."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream.errors import DecodingError
from slipstream.evaluation import refuse_lossy
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
