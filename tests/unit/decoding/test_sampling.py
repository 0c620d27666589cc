"""Sampling is exact in distribution, and fixed by seed and prompt whatever the batch or the drafter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch

from slipstream.decoding.sampling import choose, uniforms
from slipstream.decoding.speculative import decode_plain, decode_speculative
from slipstream.errors import DecodingError
from slipstream.target.model import Target
from support.proposers import Follower


def test_uniforms_are_a_function_of_seed_index_and_position() -> None:
    assert torch.equal(uniforms(7, 3, 40)[:9], uniforms(7, 3, 9))
    assert not torch.equal(uniforms(7, 3, 9), uniforms(7, 4, 9))
    assert not torch.equal(uniforms(8, 3, 9), uniforms(7, 3, 9))
    draws = torch.cat([uniforms(0, i, 50) for i in range(400)])
    assert draws.dtype == torch.float64
    assert draws.min() >= 0
    assert draws.max() < 1
    assert abs(float(draws.mean()) - 0.5) < 0.01


def test_choose_inverts_the_distribution_function() -> None:
    logits = torch.tensor([0.0, 1.0, -1.0, float("-inf"), 2.0])
    for temperature in (0.5, 1.0, 3.0):
        edges = torch.softmax(logits.double() / temperature, -1).cumsum(-1)
        noise = torch.linspace(0, 1, 1001, dtype=torch.float64)[:-1]
        tokens, finite = choose(logits.expand(1000, -1), temperature, noise)
        assert tokens.tolist() == [int((edges <= u).sum()) for u in noise]
        assert 3 not in tokens.tolist()
        assert bool(finite.all())


def test_choose_at_zero_is_argmax_and_tells_what_is_not_finite() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0], [float("nan"), 0.0, 1.0], [float("inf"), 0.0, 1.0]])
    tokens, finite = choose(logits, 0.0, None)
    assert int(tokens[0]) == 1
    assert finite.tolist() == [True, False, False]


def test_a_temperature_without_noise_is_refused() -> None:
    with pytest.raises(DecodingError, match="no noise"):
        choose(torch.zeros(3), 1.0, None)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_sampled_text_depends_on_seed_and_prompt_index_only(
    family: str, target_of: Callable[[str], Target], prompts: list[list[int]]
) -> None:
    target = target_of(family)
    options = {"max_new_tokens": 10, "temperature": 1.5, "seed": 5}
    reference = [g.output_ids for g in decode_plain(target, prompts, batch_size=1, **options).generations]
    assert [g.output_ids for g in decode_plain(target, prompts, batch_size=4, **options).generations] == reference
    for batch_size in (1, 5):
        for follow in (lambda t: (7 * t + 1) % 250,):
            spec = decode_speculative(target, Follower(follow), prompts, block_size=5, batch_size=batch_size, **options)
            assert [g.output_ids for g in spec.generations] == reference
    pieces = decode_plain(target, prompts[3:], batch_size=2, first_index=3, **options)
    assert [g.output_ids for g in pieces.generations] == reference[3:]
    other = decode_plain(target, prompts, batch_size=4, **{**options, "seed": 6})
    assert [g.output_ids for g in other.generations] != reference


def test_block_sampling_has_the_targets_joint_distribution(target_of: Callable[[str], Target]) -> None:
    """Chi-square of two sampled tokens against exact probabilities, with a drafter that is often right."""
    target, prompt, temperature, runs = target_of("qwen3"), [9, 8, 7], 0.06, 3000

    def distribution(ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            logits = target.model(torch.tensor([ids]), use_cache=False).logits[0, -1]
        return torch.softmax(logits.double() / temperature, -1)

    first = distribution(prompt)
    likely = first.topk(4).indices.tolist()
    after = {t: distribution([*prompt, t]) for t in likely}
    best = {t: int(p.argmax()) for t, p in after.items()}
    decoded = decode_speculative(
        target,
        Follower(lambda t: best.get(t, 0)),
        [prompt] * runs,
        block_size=4,
        max_new_tokens=3,
        temperature=temperature,
        seed=1,
        batch_size=500,
    )
    assert any(g.accept_lengths[0] > 1 for g in decoded.generations)
    counts = Counter(g.output_ids[:2] for g in decoded.generations)
    pairs = [(t, s, float(first[t] * after[t][s])) for t in likely for s in after[t].topk(6).indices.tolist()]
    pairs = [(t, s, p) for t, s, p in pairs if runs * p > 10]
    assert len(pairs) > 5, "too few bins for a chi-square"
    observed = [counts.pop((t, s), 0) for t, s, _ in pairs]
    expected = [runs * p for *_, p in pairs]
    observed.append(sum(counts.values()))
    expected.append(runs - sum(expected))
    statistic = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))
    degrees = torch.tensor((len(observed) - 1) / 2, dtype=torch.float64)
    p_value = float(torch.special.gammaincc(degrees, torch.tensor(statistic / 2, dtype=torch.float64)))
    assert p_value > 1e-4, (statistic, observed, expected)
