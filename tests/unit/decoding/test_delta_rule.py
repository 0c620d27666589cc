"""The state after any count of tokens, calculated at once, equals the recurrence written out."""

from __future__ import annotations

import torch

from slipstream.decoding.delta_rule import advance


def step_by_step(
    state: torch.Tensor, key: torch.Tensor, value: torch.Tensor, decay: torch.Tensor, rate: torch.Tensor, count: int
) -> torch.Tensor:
    """One row ``[V, D, E]``, one token after the other."""
    state = state.clone()
    share = value.shape[1] // key.shape[1]
    for t in range(count):
        for head in range(value.shape[1]):
            k = key[t, head // share]
            k = k / torch.sqrt(k.square().sum() + 1e-6)
            state[head] *= decay[t, head].exp()
            update = rate[t, head] * (value[t, head] - state[head].T @ k)
            state[head] += torch.outer(k, update)
    return state


def test_advance_equals_the_recurrence_for_every_count() -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    rows, tokens, keys, values, d, e = 8, 7, 2, 4, 5, 3
    state, key, value = draw(rows, values, d, e), draw(rows, tokens, keys, d), draw(rows, tokens, values, e)
    decay, rate = -3 * draw(rows, tokens, values).abs(), draw(rows, tokens, values).sigmoid()
    counts = torch.arange(rows)
    found = advance(state, key, value, decay, rate, counts)
    for row in range(rows):
        expected = step_by_step(state[row], key[row], value[row], decay[row], rate[row], int(counts[row]))
        torch.testing.assert_close(found[row], expected, atol=1e-5, rtol=1e-5)


def test_a_very_strong_decay_stays_finite() -> None:
    ones = torch.ones(1, 16, 1, 4)
    found = advance(torch.ones(1, 1, 4, 4), ones, ones, torch.full((1, 16, 1), -60.0), ones[..., 0], torch.tensor([16]))
    assert bool(torch.isfinite(found).all())
