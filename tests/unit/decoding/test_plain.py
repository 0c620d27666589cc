"""Plain decoding's batches: who goes on when rows end, on each device, and what a step costs the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from slipstream.decoding import plain, speculative
from slipstream.decoding.responses import Response, kept_rows
from slipstream.decoding.speculative import decode_plain, decode_speculative
from slipstream.decoding.steps import StepState
from slipstream.errors import DecodingError
from slipstream.target.model import Target
from support.proposers import Follower

CPU, GPU = torch.device("cpu"), torch.device("cuda")
ROWS = 12


@pytest.fixture
def many() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 12, (ROWS,), generator=generator).tolist()
    return [torch.randint(0, 250, (n,), generator=generator).tolist() for n in lengths]


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that have ended stay in the batch as they do on a GPU."""
    for module in (plain, speculative):
        monkeypatch.setattr(module, "kept_rows", lambda live, _device: kept_rows(live, GPU))


@pytest.mark.parametrize(
    ("live", "on_cpu", "on_gpu"),
    [
        ("1111", None, None),
        ("1011", [0, 2, 3], [0, 2, 3]),
        ("10111111", [0, 2, 3, 4, 5, 6, 7], None),
        ("10101111", [0, 2, 4, 5, 6, 7], [0, 2, 4, 5, 6, 7]),
        ("10101110", [0, 2, 4, 5, 6], [0, 1, 2, 4, 5, 6]),
        ("00000001", [7], [7]),
        ("0001001", [3, 6], [3, 6]),
        ("01", [1], [1]),
    ],
)
def test_who_goes_on(live: str, on_cpu: list[int] | None, on_gpu: list[int] | None) -> None:
    flags = [c == "1" for c in live]
    assert kept_rows(flags, CPU) == on_cpu
    assert kept_rows(flags, GPU) == on_gpu


def test_a_gpus_batches_shrink_to_few_sizes_and_hold_no_more_than_half_a_batch_of_ended_rows() -> None:
    sizes, rows = set(), [True] * 2048
    for _ in range(2047):
        rows[rows.index(True)] = False
        kept = kept_rows(rows, GPU)
        if kept is not None:
            rows = [rows[i] for i in kept]
            sizes.add(len(rows))
        assert len(rows) <= 1.5 * sum(rows)
    assert sizes == {1, 2, 3, *(s << n for n in range(10) for s in (4, 6) if s << n < 2048)}


def stopped(answer: Sequence[int], eos: Sequence[int], limit: int) -> tuple[tuple[int, ...], str]:
    end = next((i + 1 for i, t in enumerate(answer[:limit]) if t in eos), limit)
    return tuple(answer[:end]), "eos" if answer[end - 1] in eos else "length"


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
@pytest.mark.parametrize("temperature", [0.0, 1.2])
@pytest.mark.usefixtures("as_on_a_gpu")
def test_rows_that_stay_in_the_batch_change_no_answer(
    family: str, temperature: float, target_of: Callable[[str], Target], altered: Callable[..., Target],
    many: list[list[int]],
) -> None:  # fmt: skip
    options: dict[str, Any] = {"temperature": temperature, "seed": 4}
    alone = [
        decode_plain(target_of(family), [p], max_new_tokens=12, first_index=i, **options).generations[0].output_ids
        for i, p in enumerate(many)
    ]
    stops = sorted({alone[row][row % 9] for row in range(0, ROWS, 2)})  # rows end all along
    for eos, limit, batch_size in ((stops, 12, ROWS), (stops, 12, 7), (stops[:1], 5, ROWS), (stops, 1, 5), ([], 3, 9)):
        target = altered(target_of(family), *eos)
        wanted = [stopped(answer, eos, limit) for answer in alone]
        found = decode_plain(target, many, max_new_tokens=limit, batch_size=batch_size, **options)
        assert [(g.output_ids, g.finish) for g in found.generations] == wanted
        spec = decode_speculative(
            target, Follower(lambda t: (7 * t + 1) % 250), many,
            block_size=4, max_new_tokens=limit, batch_size=batch_size, **options,
        )  # fmt: skip
        assert [(g.output_ids, g.finish) for g in spec.generations] == wanted
        assert all(1 + sum(g.accept_lengths) == len(g.output_ids) for g in spec.generations)
        assert found.row_rounds == sum(len(output) - 1 for output, _ in wanted)


def test_a_step_loops_over_no_rows_and_reads_the_device_once(
    target_of: Callable[[str], Target], altered: Callable[..., Target], many: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    takes, reads, keeps = [], [], []
    take, cpu, keep = Response.take, torch.Tensor.cpu, StepState.keep
    monkeypatch.setattr(Response, "take", lambda self, tokens, **k: takes.append(1) or take(self, tokens, **k))
    monkeypatch.setattr(torch.Tensor, "cpu", lambda self: reads.append(1) or cpu(self))
    monkeypatch.setattr(StepState, "keep", lambda self, rows: keeps.append(len(rows)) or keep(self, rows))
    monkeypatch.setattr(plain, "kept_rows", lambda live, _device: kept_rows(live, GPU))
    target = altered(target_of("qwen3"), *range(0, 250, 9))
    found = decode_plain(target, many, max_new_tokens=20, batch_size=ROWS)
    assert len({len(g.output_ids) for g in found.generations}) > 3
    assert not takes
    assert len(reads) == found.rounds + 1
    assert keeps
    assert set(keeps) <= {1, 2, 3, 4, 6, 8}


@pytest.mark.usefixtures("as_on_a_gpu")
def test_logits_that_are_not_finite_are_told_of_rows_that_go_on_alone(
    target_of: Callable[[str], Target], altered: Callable[..., Target], many: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    real = plain.choose
    broken: list[int] = []

    def choose(logits: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, finite = real(logits, *args)
        finite = finite.clone()
        if len(finite) == len(batch) and len(calls) == 2:
            finite[broken] = False
        calls.append(1)
        return tokens, finite

    monkeypatch.setattr(plain, "choose", choose)
    batch = sorted(many, key=len)[-8:]
    first = decode_plain(target_of("qwen3"), batch, max_new_tokens=1, batch_size=8) if (calls := [0] * 9) else None
    assert first is not None
    stop = first.generations[0].output_ids[0]
    target = altered(target_of("qwen3"), stop)
    order = sorted(range(8), key=lambda i: (-len(batch[i]), i))
    ended = [order.index(i) for i, g in enumerate(first.generations) if g.output_ids[0] == stop]
    assert len(ended) == 1, "one row ends at once, and stays among eight"
    calls, broken = [], ended
    decode_plain(target, batch, max_new_tokens=4, batch_size=8)
    calls, broken = [], [place for place in range(8) if place not in ended][:1]
    with pytest.raises(DecodingError, match=rf"for prompt {order[broken[0]]} after 2 tokens"):
        decode_plain(target, batch, max_new_tokens=4, batch_size=8)
