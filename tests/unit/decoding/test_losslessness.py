"""First differences: found, judged against measured rounding, and never excused without it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch

from slipstream.decoding import short_states
from slipstream.decoding.losslessness import compare_lossless, first_difference, near_tie_limit
from slipstream.decoding.plain import decode_plain, generate_plain
from slipstream.decoding.prefill import DecoderCall, prefill
from slipstream.decoding.recurrent import RecurrentStates
from slipstream.decoding.rollback import TargetState
from slipstream.decoding.speculative import decode_speculative
from slipstream.errors import DecodingError
from slipstream.records import Generation
from slipstream.target import rules
from slipstream.target.model import Target
from support.kernels import CHUNKED, RECURRENT, kernel_of, own_rule, take_kernels, to_tensor_float
from support.proposers import Follower


def test_where_two_responses_part() -> None:
    assert first_difference((1, 2, 3), (1, 2, 4)) == 2
    assert first_difference((1, 2), (1, 2, 4)) == 2
    assert first_difference((), (1,)) == 0


def test_the_limit_follows_the_noise_between_two_units_and_eight() -> None:
    eps = torch.finfo(torch.bfloat16).eps
    assert near_tie_limit(0.0, 10.0, torch.bfloat16) == pytest.approx(20 * eps)
    assert near_tie_limit(0.1, 10.0, torch.bfloat16) == pytest.approx(0.3)
    assert near_tie_limit(5.0, -10.0, torch.bfloat16) == pytest.approx(80 * eps)
    assert near_tie_limit(0.0, 10.0, torch.float32) < 1e-5


def test_the_first_difference_is_found_and_judged(target_of: Callable[[str], Target]) -> None:
    target = target_of("qwen3")
    with torch.inference_mode():
        logits = target.model(torch.tensor([[5, 6]]), use_cache=False).logits[0, -1]
    best, second = logits.topk(2).indices.tolist()
    gap = float(logits[best] - logits[second])
    plain = [
        Generation(prompt_ids=(5,), output_ids=(6, best, 1)),
        Generation(prompt_ids=(5,), output_ids=(6, best)),
        Generation(prompt_ids=(5,), output_ids=(6, best)),
    ]
    other = [
        Generation(prompt_ids=(5,), output_ids=(6, second, 1)),
        Generation(prompt_ids=(5,), output_ids=(6, best)),
        Generation(prompt_ids=(5,), output_ids=(6,)),
    ]
    result = compare_lossless(plain, other, target=target)
    assert (result.responses, result.equal) == (3, 1)
    first, shorter = result.first_differences
    assert (first["prompt"], first["position"], first["plain"], first["speculative"]) == (0, 1, best, second)
    assert first["logit_gap"] == pytest.approx(gap, abs=1e-4)
    assert first["top2_gap"] == pytest.approx(gap, abs=1e-4)
    assert first["near_tie"] is False
    assert (shorter["prompt"], shorter["position"], shorter["speculative"]) == (2, 1, None)


def test_a_bfloat16_tie_is_called_near(target_of: Callable[[str], Target], monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of("qwen3")
    head = target.head

    def tied(hidden: torch.Tensor) -> torch.Tensor:
        logits = head(hidden).bfloat16()
        logits[..., 7], logits[..., 9] = 200.0, 201.0
        return logits

    monkeypatch.setattr(target, "head", tied)
    pair = [[Generation(prompt_ids=(5,), output_ids=(token,))] for token in (7, 9)]
    (difference,) = compare_lossless(*pair, target=target).first_differences
    assert difference["near_tie"] is True
    assert difference["logit_gap"] == pytest.approx(1.0)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_the_noise_is_that_of_the_dtype(family: str, rows: int, target_of: Callable[..., Target]) -> None:
    target = target_of(family)
    (plain,), _ = generate_plain(target, [list(range(5, 25))], max_new_tokens=12)
    wrong = (plain.output_ids[-1] + 1) % target.info.vocab_rows
    other = Generation(prompt_ids=plain.prompt_ids, output_ids=(*plain.output_ids[:-1], wrong))
    result = compare_lossless([plain], [other], target=target, batch_size=rows)
    assert result.rounding_noise is not None
    assert 0 < result.rounding_noise < 1e-4
    assert result.faults == result.first_differences


def test_a_wrong_token_is_a_fault_in_bfloat16_too(target_of: Callable[..., Target]) -> None:
    target = target_of("qwen3")
    model = target.model.to(torch.bfloat16)
    try:
        (plain,), _ = generate_plain(target, [list(range(5, 25))], max_new_tokens=12)
        prefix = torch.tensor([[*plain.prompt_ids, *plain.output_ids[:-1]]])
        with torch.inference_mode():
            worst = int(model(prefix, use_cache=False).logits[0, -1].argmin())
        other = Generation(prompt_ids=plain.prompt_ids, output_ids=(*plain.output_ids[:-1], worst))
        result = compare_lossless([plain], [other], target=target)
    finally:
        target.model.float()
    assert len(result.faults) == 1
    assert result.rounding_noise is not None
    assert result.rounding_noise < 0.2


def test_a_broken_cache_does_not_excuse_everything(
    target_of: Callable[..., Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    from slipstream.decoding import losslessness

    monkeypatch.setattr(losslessness, "_rounding_noise", lambda *_: 1e3)
    target = target_of("qwen3")
    (plain,), _ = generate_plain(target, [[5, 6, 7]], max_new_tokens=4)
    wrong = (plain.output_ids[-1] + 1) % target.info.vocab_rows
    other = Generation(prompt_ids=plain.prompt_ids, output_ids=(*plain.output_ids[:-1], wrong))
    assert len(compare_lossless([plain], [other], target=target).faults) == 1


@pytest.fixture
def tensor_float(target_of: Callable[..., Target], monkeypatch: pytest.MonkeyPatch) -> Target:
    """Return a float32 target as on a GPU with FLA: chunks are read in TF32, single tokens in float32."""
    kernels = {CHUNKED: kernel_of(own_rule(CHUNKED), to_tensor_float), RECURRENT: kernel_of(own_rule(RECURRENT), id_)}
    take_kernels(monkeypatch, **kernels)
    monkeypatch.setattr(rules, "kernels_run_on", lambda _: True)
    monkeypatch.setattr(short_states, "suits_short_block", lambda _: False)  # what a CPU runs instead
    target = target_of("qwen3_5")
    assert rules.settle_rules(target.model)
    return target


def id_(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def as_it_was(target: Target) -> None:
    """Take FLA's chunked kernel in decoding, too."""
    sys.modules[type(target.model).__module__].torch_chunk_gated_delta_rule.exact = None  # type: ignore[attr-defined]


@pytest.mark.parametrize("mended", [True, False])
@torch.inference_mode()
def test_a_block_and_single_tokens_are_read_alike_in_float32(tensor_float: Target, mended: bool) -> None:
    """As near as float32 rounds, though the kernels for more than one token multiply in TF32."""
    if not mended:
        as_it_was(tensor_float)
    call = DecoderCall(tensor_float)
    prompts = [list(range(5, 30)), list(range(60, 77))]
    block = torch.tensor([[7, 9, 11, 200, 3, 8, 40, 41], [1, 2, 3, 4, 5, 6, 7, 8]])

    def state() -> TargetState:
        return TargetState(call, prefill(call, prompts, None), 64)

    with state() as whole:
        at_once = whole.verify(block)
    singles = []
    with state() as stepwise:
        for token in block.split(1, dim=1):
            singles.append(stepwise.verify(token))
            stepwise.commit([1, 1])
    apart = (at_once - torch.cat(singles, dim=1)).norm() / at_once.norm()
    assert apart < 1e-5 if mended else apart > 1e-4


@pytest.mark.parametrize("fault", [False, True])
def test_kernels_in_tensor_float_neither_alarm_nor_excuse(
    tensor_float: Target, fault: bool, monkeypatch: pytest.MonkeyPatch, prompts: list[list[int]]
) -> None:
    """Rounding stays float32's, so that block decoding is lossless, and a rollback that forgets is found."""
    options = {"max_new_tokens": 24, "batch_size": 3}
    plain = decode_plain(tensor_float, prompts, **options).generations
    following = {a: b for g in plain for a, b in pairwise(g.output_ids)}
    drafts = Follower(lambda token: following.get(token, 0))
    if fault:
        monkeypatch.setattr(RecurrentStates, "roll_back", lambda *_: None)
    spec = decode_speculative(tensor_float, drafts, prompts, block_size=6, **options).generations
    assert {len(set(g.accept_lengths)) > 1 for g in spec} == {True}  # of every kind, so that much is rolled back
    result = compare_lossless(plain, spec, target=tensor_float, batch_size=3)
    assert bool(result.faults) is fault
    assert fault or result.equal == len(prompts)


@pytest.mark.parametrize("rows", [1, 3])
def test_the_noise_is_float32s_whatever_the_kernels_multiply_in(tensor_float: Target, rows: int) -> None:
    (plain,), _ = generate_plain(tensor_float, [list(range(5, 25))], max_new_tokens=12)
    wrong = (plain.output_ids[-1] + 1) % tensor_float.info.vocab_rows
    other = Generation(prompt_ids=plain.prompt_ids, output_ids=(*plain.output_ids[:-1], wrong))
    result = compare_lossless([plain], [other], target=tensor_float, batch_size=rows)
    assert result.rounding_noise is not None
    assert result.rounding_noise < 1e-4
    assert result.faults == result.first_differences
    as_it_was(tensor_float)
    result = compare_lossless([plain], [other], target=tensor_float, batch_size=rows)
    assert result.rounding_noise is not None
    assert result.rounding_noise > 2e-4


def test_different_prompts_are_refused() -> None:
    a, b = (Generation(prompt_ids=(n,), output_ids=(1,)) for n in range(2))
    with pytest.raises(DecodingError, match="different prompts"):
        compare_lossless([a], [b])
