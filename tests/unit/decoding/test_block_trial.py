"""The fastest block size is found by the shortest times, whatever order and noise there is."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from slipstream.config import DrafterSettings, EvaluationConfig
from slipstream.decoding import block_trial
from slipstream.decoding.block_trial import PLAIN, REPEATS, compare_block_sizes
from slipstream.decoding.responses import Decoded, SpeculativeGeneration
from slipstream.drafter.config import DrafterConfig, resolve
from slipstream.drafter.model import DraftModel
from slipstream.errors import DecodingError
from slipstream.target.model import Target


def drafter_for(target: Target) -> tuple[DraftModel, DrafterConfig]:
    config = resolve(DrafterSettings(layers=1, block_size=6, target_layer_ids=(1, 4)), target.info, 300)
    return DraftModel(config).eval(), config


def test_a_real_trial_fills_every_number(target_of: Callable[[str], Target], prompts: list[list[int]]) -> None:
    target = target_of("qwen3_5")
    model, config = drafter_for(target)
    settings = EvaluationConfig(max_new_tokens=8, batch_size=4)
    finished: list[tuple[int, int]] = []
    found = compare_block_sizes(
        target,
        model,
        config,
        prompts,
        (3, 6),
        settings,
        separate=True,
        progress=lambda done, total: finished.append((done, total)),
    )
    tree = json.loads(json.dumps(found.as_json()))
    assert [t["block_size"] for t in tree["tried"]] == [3, 6]
    assert tree["chosen"] == max(tree["tried"], key=lambda t: t["ratio"])["block_size"]
    assert all(t["tau"] >= 1 and t["tokens_per_second"] > 0 and t["spread"] >= 0 for t in tree["tried"])
    for tried in tree["tried"]:
        assert tried["ratio"] == pytest.approx(tried["tokens_per_second"] / tree["plain_tokens_per_second"])
    assert (tree["prompts"], tree["separate"], tree["max_new_tokens"]) == (6, True, 8)
    assert (tree["batch_size"], tree["repeats"]) == (4, REPEATS)
    total = REPEATS * 2 * 3
    assert finished == [(n, total) for n in range(1, total + 1)]
    with pytest.raises(DecodingError, match="block_size is 7"):
        compare_block_sizes(target, model, config, prompts, (3, 7), settings, separate=True)


class Machine:
    """Stands in for decoding: every run takes its set time, and another one now and then takes much longer."""

    def __init__(self, seconds: dict[int, float], noise: Callable[[int], float]) -> None:
        self.seconds, self.noise = seconds, noise
        self.order: list[tuple[int, int]] = []

    def run(self, size: int, prompts: Sequence[Sequence[int]], first: int) -> Decoded:
        self.order.append((first, size))
        length = 12
        lengths = () if size == PLAIN else (1,) * (length - 1)
        generations: list[Any] = [
            SpeculativeGeneration(prompt_ids=tuple(p), output_ids=(1,) * length, accept_lengths=lengths)
            for p in prompts
        ]
        seconds = self.seconds[size] * self.noise(len(self.order))
        return Decoded(generations=generations, seconds=seconds, prefill_seconds=0.0, rounds=1, row_rounds=1)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(
            block_trial, "decode_plain", lambda t, p, *, first_index, **_: self.run(PLAIN, p, first_index)
        )
        monkeypatch.setattr(
            block_trial,
            "decode_speculative",
            lambda t, d, p, *, block_size, first_index, **_: self.run(block_size, p, first_index),
        )


def trial(target: Target, machine: Machine, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Any:
    machine.install(monkeypatch)
    model, config = drafter_for(target)
    prompts = [[1] * n for n in (3, 9, 5, 7)]
    settings = EvaluationConfig(batch_size=2, **options)
    return compare_block_sizes(target, model, config, prompts, (2, 4, 6), settings, separate=False)


def test_the_fastest_is_chosen_in_spite_of_slow_moments(
    target_of: Callable[[str], Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    true = {PLAIN: 1.0, 2: 0.9, 4: 0.8, 6: 1.1}
    # One run in five is slowed down threefold: never all the repeats of the same batch and size.
    machine = Machine(true, lambda number: 3.0 if number % 5 == 0 else 1.0)
    found = trial(target_of("qwen3"), machine, monkeypatch)
    assert found.chosen == 4
    assert [t.ratio for t in found.tried] == pytest.approx([1 / 0.9, 1 / 0.8, 1 / 1.1])
    assert found.plain_tokens_per_second == pytest.approx(4 * 12 / 2.0)
    assert max(t.spread for t in found.tried) > 0.5
    quiet = trial(target_of("qwen3"), Machine(true, lambda _: 1.0), monkeypatch)
    assert max(t.spread for t in quiet.tried) == pytest.approx(0)


def test_runs_take_turns_and_each_repeat_another_order(
    target_of: Callable[[str], Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(dict.fromkeys((PLAIN, 2, 4, 6), 1.0), lambda _: 1.0)
    trial(target_of("qwen3"), machine, monkeypatch)
    rounds = [machine.order[at : at + 4] for at in range(0, len(machine.order), 4)]
    assert len(rounds) == 2 * REPEATS
    for round_ in rounds:
        assert len({first for first, _ in round_}) == 1, "one batch at a time"
        assert {size for _, size in round_} == {PLAIN, 2, 4, 6}
    for first in (0, 2):
        starts = [round_[0][1] for round_ in rounds if round_[0][0] == first]
        assert len(set(starts)) == REPEATS, "every repeat begins with another size"


def test_a_slow_first_run_of_each_size_does_not_count(
    target_of: Callable[[str], Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine({PLAIN: 1.0, 2: 0.9, 4: 0.8, 6: 1.1}, lambda number: 50.0 if number <= 8 else 1.0)
    found = trial(target_of("qwen3"), machine, monkeypatch)
    assert found.chosen == 4
    assert found.tried[1].ratio == pytest.approx(1.25)
    assert max(t.spread for t in found.tried) == pytest.approx(0)
