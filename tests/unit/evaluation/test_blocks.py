"""Which prompts a trial of block sizes gets, and which sizes are refused before anything is loaded."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream.config import EvaluationConfig
from slipstream.errors import ConfigError
from slipstream.evaluation.blocks import check_block_sizes, prompts_to_read, split_prompts, trial_size


def settings(**changes: Any) -> EvaluationConfig:
    return EvaluationConfig(**{"compare_block_sizes": (4, 8), "batch_size": 8, **changes})


@pytest.mark.parametrize(("batch", "expected"), [(1, 8), (4, 8), (8, 16), (16, 32), (64, 64)])
def test_a_trial_has_at_least_one_whole_batch(batch: int, expected: int) -> None:
    assert trial_size(settings(batch_size=batch)) == expected
    assert trial_size(settings(batch_size=batch, compare_block_sizes=())) == 0


@pytest.mark.parametrize(
    ("limit", "there", "measured", "tried", "separate"),
    [
        (48, 64, 48, 16, True),  # those behind max_prompts
        (48, 58, 48, 10, True),  # fewer, but a batch
        (48, 50, 34, 16, True),  # the evaluation gives some
        (0, 60, 44, 16, True),
        (0, 48, 32, 16, True),
        (0, 47, 47, 16, False),  # it cannot spare them
        (20, 24, 20, 16, False),
        (4, 20, 4, 16, True),
        (0, 5, 5, 5, False),
    ],
)
def test_the_trial_has_prompts_of_its_own_where_there_are_enough(
    limit: int, there: int, measured: int, tried: int, separate: bool
) -> None:
    given = settings(max_prompts=limit)
    assert prompts_to_read(given) == (limit + 16 if limit else 0)
    prompts = [[n] for n in range(there)]
    split = split_prompts(prompts, given)
    assert (len(split.measured), len(split.tried), split.separate) == (measured, tried, separate)
    assert split.measured == prompts[:measured], "the evaluation keeps the first ones"
    assert separate is not any(p in split.measured for p in split.tried)


def test_without_a_trial_the_prompts_are_as_they_were() -> None:
    prompts = [[n] for n in range(10)]
    for limit in (0, 4, 20):
        given = EvaluationConfig(max_prompts=limit)
        assert prompts_to_read(given) == limit
        split = split_prompts(prompts[: limit or None], given)
        assert split.measured == prompts[: limit or None]
        assert split.tried == []


@pytest.mark.parametrize(
    ("changes", "trained", "message"),
    [
        ({"block_size": 1, "compare_block_sizes": ()}, None, "block_size is 1; a block is an anchor"),
        ({"block_size": 17, "compare_block_sizes": ()}, 16, "block_size is 17, but .* trained with 16; use 2 to 16"),
        ({"compare_block_sizes": (4, 0)}, None, "compare_block_sizes holds 0; a block"),
        ({"compare_block_sizes": (4, 32)}, 16, "holds 32, but the drafter was trained with 16"),
        ({"compare_block_sizes": (4, 8, 4)}, 16, "holds 4 twice"),
        ({"block_size": 4}, 16, "block_size is 4, but .*compare_block_sizes is to choose one"),
    ],
)
def test_bad_sizes_are_refused_in_one_line(changes: dict[str, Any], trained: int | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        check_block_sizes(settings(**changes), trained)
    assert "\n" not in str(caught.value)


def test_good_sizes_pass() -> None:
    check_block_sizes(EvaluationConfig())
    check_block_sizes(EvaluationConfig(), 16)
    check_block_sizes(EvaluationConfig(block_size=16), 16)
    check_block_sizes(settings(compare_block_sizes=(2, 16)), 16)
    check_block_sizes(settings(compare_block_sizes=(400,)))
