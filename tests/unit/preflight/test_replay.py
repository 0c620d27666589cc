"""Answers that block decoding reproduces with perfect drafts."""

from __future__ import annotations

import dataclasses

import pytest

from slipstream.decoding.plain import generate_plain
from slipstream.preflight import replay
from slipstream.preflight.report import CheckFailure

PROMPTS = [[5, 6, 7, 8], [9, 10, 11], [40, 41, 42, 43, 44]]


def test_in_float32_every_answer_is_whole(run) -> None:
    plain, _ = generate_plain(run.target, PROMPTS, max_new_tokens=13, batch_size=3)
    found = replay.reproducible_answers(run.target, PROMPTS, block_size=4, max_new_tokens=13)
    assert [g.output_ids for g in found] == [g.output_ids for g in plain]


def test_an_answer_is_cut_before_a_near_tie_to_whole_blocks(run, monkeypatch) -> None:
    genuine = replay.compare_lossless

    def parts_at_six(plain, other, **kwargs):
        tie = {"prompt": 0, "position": 6, "plain": 1, "speculative": 2, "near_tie": True}
        return dataclasses.replace(genuine(plain, other, **kwargs), first_differences=(tie,))

    monkeypatch.setattr(replay, "compare_lossless", parts_at_six)
    found = replay.reproducible_answers(run.target, PROMPTS[:1], block_size=4, max_new_tokens=13)
    assert len(found[0].output_ids) == 5


def test_any_other_difference_is_a_fault(run, monkeypatch) -> None:
    genuine = replay.decode_speculative

    def wrong(*args, **kwargs):
        decoded = genuine(*args, **kwargs)
        (one,) = decoded.generations
        changed = dataclasses.replace(one, output_ids=((one.output_ids[0] + 1) % 250, *one.output_ids[1:]))
        return dataclasses.replace(decoded, generations=[changed])

    monkeypatch.setattr(replay, "decode_speculative", wrong)
    with pytest.raises(CheckFailure, match="acceptance or the rollback"):
        replay.reproducible_answers(run.target, PROMPTS[:1], block_size=4, max_new_tokens=13)
