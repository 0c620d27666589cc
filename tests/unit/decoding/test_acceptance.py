"""What is counted, what is compared, and the whole evaluation on a tiny target."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from slipstream.config import DrafterSettings, EvaluationConfig
from slipstream.decoding import acceptance
from slipstream.decoding.acceptance import evaluate, summarise
from slipstream.decoding.responses import SpeculativeGeneration
from slipstream.drafter.config import resolve
from slipstream.drafter.model import DraftModel
from slipstream.errors import DecodingError
from slipstream.target.model import Target


def response(*lengths: int, cut: bool = False, output: tuple[int, ...] = (), prompt: int = 0) -> SpeculativeGeneration:
    return SpeculativeGeneration(
        prompt_ids=(prompt,), output_ids=output or tuple(range(1 + sum(lengths))), accept_lengths=lengths, cut=cut
    )


def test_tau_is_token_weighted_and_per_response_is_a_mean_of_means() -> None:
    result = summarise([response(4, 2), response(1, 1, 1, 1)], 4)
    assert result.tau == pytest.approx(10 / 6)
    assert result.tau_per_response == pytest.approx((3 + 1) / 2)
    assert result.histogram == (4, 1, 0, 1)
    assert result.acceptance_by_position == pytest.approx((2 / 6, 1 / 6, 1 / 6))
    assert result.tau == pytest.approx(1 + sum(result.acceptance_by_position))
    assert (result.passes, result.cut_passes, result.cut_passes_counted) == (6, 0, False)


def test_runs_of_accepted_drafts_are_counted_not_multiplied() -> None:
    # Accepted drafts 3, 2, 1, 0: the mean is 1.5; the product of per-slot rates would say otherwise.
    assert summarise([response(4, 3, 2, 1)], 4).tau - 1 == pytest.approx(1.5)


def test_a_cut_pass_is_left_out() -> None:
    result = summarise([response(4, 4, 2, cut=True), response(1, cut=True)], 4)
    assert (result.tau, result.passes, result.cut_passes) == (4.0, 2, 2)
    assert result.tau_all_passes == pytest.approx((4 + 4 + 2 + 1) / 4)
    assert result.histogram == (0, 0, 0, 2)


def test_a_response_with_a_cut_pass_only_stays_in_the_mean_over_responses() -> None:
    result = summarise([response(4, 4, 2, cut=True), response(1, cut=True), response()], 4)
    assert result.tau_per_response == pytest.approx((4 + 1) / 2)


def test_cut_passes_count_only_if_there_is_no_other() -> None:
    result = summarise([response(3, cut=True)], 4)
    assert (result.tau, result.cut_passes_counted) == (3.0, True)


def test_no_pass_at_all_is_an_error() -> None:
    with pytest.raises(DecodingError, match="all 2 responses ended with their first token"):
        summarise([response(), response()], 4)


@pytest.mark.parametrize("temperature", [0.0, 1.2])
def test_evaluate_fills_every_number(
    temperature: float, target_of: Callable[[str], Target], prompts: list[list[int]]
) -> None:
    target = target_of("qwen3_5")
    config = resolve(DrafterSettings(layers=1, block_size=4, target_layer_ids=(1, 4)), target.info, 300)
    settings = EvaluationConfig(max_prompts=4, max_new_tokens=12, batch_size=3, temperature=temperature)
    finished: list[tuple[int, int]] = []
    result = evaluate(
        target,
        DraftModel(config),
        config,
        prompts,
        settings,
        table_ids=prompts,
        progress=lambda done, total: finished.append((done, total)),
    )
    tree = json.loads(json.dumps(result.as_json()))
    assert tree["lossless"] == {"responses": 4, "equal": 4, "first_differences": []}
    assert 1.0 <= tree["tau"] <= 4.0
    assert tree["accepted_drafts"] == pytest.approx(tree["tau"] - 1)
    assert len(tree["acceptance_by_position"]) == 3
    assert sum(tree["histogram"]) == tree["passes"]
    assert tree["generated_tokens"] == 48
    assert (tree["prompts"], tree["block_size"], tree["temperature"]) == (4, 4, temperature)
    assert set(tree["baselines"]) == {"bigram", "trigram", "prompt_lookup", "lookup_bigram"}
    assert tree["speedup"] == pytest.approx(tree["tokens_per_second"] / tree["baseline_tokens_per_second"])
    assert tree["break_even_tau"] > 0
    assert tree["speedup_after_prefill"] > 0
    assert (tree["trained_block_size"], tree["baselines_block_size"]) == (4, 4)
    assert 1.0 <= tree["tau_all_passes"] <= tree["tau"] + 1e-9
    assert tree["target_dtype"] == "float32"
    assert tree["rounding_noise"] is None
    assert finished == [(n, 8) for n in range(1, 9)]


def test_the_free_drafters_have_the_drafters_block(
    target_of: Callable[[str], Target], prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = target_of("qwen3")
    config = resolve(DrafterSettings(layers=1, block_size=8, target_layer_ids=(1, 4)), target.info, 300)
    seen: list[int] = []

    def spy(chosen: Any, answers: Any, tables: Any, block_size: int) -> dict[str, float]:
        seen.append(block_size)
        return {}

    monkeypatch.setattr(acceptance, "baseline_taus", spy)
    settings = EvaluationConfig(max_new_tokens=6, max_prompts=2)
    for block_size, expected in ((None, 8), (3, 3)):
        result = evaluate(target, DraftModel(config), config, prompts, settings, block_size=block_size)
        assert (result.block_size, len(result.histogram), seen.pop()) == (expected, expected, expected)
        assert result.details["baselines_block_size"] == expected
