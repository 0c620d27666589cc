"""The free drafters, by hand and against the real decoder."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from slipstream.decoding.acceptance import summarise
from slipstream.decoding.baselines import Lookup, NextTokenTable, baseline_taus, walk
from slipstream.decoding.speculative import decode_speculative
from slipstream.target.model import Target
from support.proposers import Follower


def test_a_table_gives_the_most_frequent_follower_and_the_smaller_id_on_ties() -> None:
    table = NextTokenTable([[1, 2, 1, 3, 1, 3], [5, 9], [5, 8]], 1)
    assert table.next([7, 1]) == 3
    assert table.next([5]) == 8
    assert table.next([3]) == 1
    assert table.next([9]) is None
    assert NextTokenTable([[1, 2, 3]], 2).next([2]) is None


def test_lookup_finds_the_newest_earlier_place_of_the_longest_run() -> None:
    lookup, text = Lookup((3, 2, 1)), [1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3]
    lookup.learn(text)
    assert lookup.find(text) == 3
    assert lookup.find([0, 2, 3]) == 7
    assert lookup.find([8, 8, 1]) == 9
    assert lookup.find([77]) is None


def test_taus_by_hand() -> None:
    # Block 4: three drafts a pass. Training text cycles 1 2 3; the answer does so up to the 7.
    taus = baseline_taus([[9]], [[1, 2, 3, 1, 2, 7, 7, 5]], [[1, 2, 3, 1, 2, 3]], 4)
    # bigram: anchor 1 -> 2 3 1 accepted, bonus 2 (4); anchor 2 -> 3 wrong, bonus 7 (1); 7 unknown: 7 (1), 5 (1)
    assert taus["bigram"] == pytest.approx(7 / 4)
    assert taus["trigram"] == pytest.approx(7 / 4)
    # lookup: 2 (1), 3 (1), 1 (1), then 1 was seen: 2 accepted, 3 is not 7 (2), 7 (1), 7 -> 7 is not 5 (1)
    assert taus["prompt_lookup"] == pytest.approx(7 / 6)
    assert set(taus) == {"bigram", "trigram", "prompt_lookup", "lookup_bigram"}


def test_a_copy_that_reaches_the_end_goes_on_into_itself() -> None:
    taus = baseline_taus([[5, 6, 5, 6, 5]], [[6, 5, 6, 5, 6, 5, 6, 5, 6, 0]], [], 5)
    # one pass accepts 5 6 5 6 and its bonus is 5; the next accepts 6 5 6 and corrects 5 to 0.
    assert taus == {"prompt_lookup": pytest.approx(9 / 2)}


def test_a_pass_that_runs_into_the_end_is_left_out() -> None:
    right = {1: 2, 2: 3, 3: 4, 4: 5, 5: 6, 6: 7}
    draft = lambda text, _: right.get(text[-1])  # noqa: E731
    assert walk([0], [1, 2, 3, 4, 5, 6, 7], 4, draft, None) == [4]
    assert walk([0], [1, 2, 3, 4, 5], 4, draft, None) == [4]
    assert walk([0], [1, 2, 3, 4], 4, draft, None) == []
    assert baseline_taus([[0]], [[1, 2, 3]], [[1, 2, 3]], 4)["bigram"] == 4.0


@pytest.mark.parametrize("limit", [7, 20, 26])
def test_the_walk_counts_as_the_real_decoder_does(
    limit: int,
    target_of: Callable[[str], Target],
    altered: Callable[..., Target],
    answers_of: Callable[[str], list[list[int]]],
    prompts: list[list[int]],
) -> None:
    answers = answers_of("llama")
    target = altered(target_of("llama"), answers[0][12], answers[3][5])
    texts = [answers[0], answers[1][::2] + answers[2]]
    bigram = NextTokenTable(texts, 1)
    decoded = decode_speculative(
        target, Follower(lambda t: bigram.next([t]) or 0), prompts, block_size=6, max_new_tokens=limit, batch_size=4
    )
    given = [g.output_ids for g in decoded.generations]
    assert summarise(decoded.generations, 6).tau == pytest.approx(baseline_taus(prompts, given, texts, 6)["bigram"])
