"""Block decoding writes exactly what plain greedy decoding writes, with drafters good, bad and mixed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from slipstream.config import DrafterSettings
from slipstream.decoding.proposer import DrafterProposer
from slipstream.decoding.speculative import decode_speculative, generate_plain, generate_speculative
from slipstream.drafter.config import resolve
from slipstream.drafter.model import DraftModel
from slipstream.errors import DecodingError, DrafterError
from slipstream.target.features import tap_layers
from slipstream.target.model import Target
from support.proposers import Oracle
from support.tiny import FAMILIES

BLOCK = 8
LIMIT = 26

RIGHT: dict[str, Callable[[int, int], int]] = {
    "perfect": lambda index, number: BLOCK,
    "wrong": lambda index, number: 0,
    "mixed": lambda index, number: (3 * index + 5 * number) % BLOCK,
}


def drafter(target: Target, **changes: Any) -> tuple[DraftModel, Any]:
    settings = {"layers": 2, "block_size": BLOCK, "target_layer_ids": (1, 3, 6), **changes}
    config = resolve(DrafterSettings(**settings), target.info, 300)
    model = DraftModel(config)
    model.init_weights(0.2, torch.Generator().manual_seed(0))
    return model, config


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", RIGHT)
@pytest.mark.parametrize("batch_size", [1, 4])
def test_greedy_is_exact(
    family: str,
    kind: str,
    batch_size: int,
    target_of: Callable[[str], Target],
    answers_of: Callable[[str], list[list[int]]],
    prompts: list[list[int]],
) -> None:
    target, answers = target_of(family), answers_of(family)
    decoded = decode_speculative(
        target,
        Oracle(prompts, answers, RIGHT[kind]),
        prompts,
        block_size=BLOCK,
        max_new_tokens=LIMIT,
        batch_size=batch_size,
    )
    for index, generation in enumerate(decoded.generations):
        assert list(generation.output_ids) == answers[index][:LIMIT]
        assert generation.prompt_ids == tuple(prompts[index])
        assert 1 + sum(generation.accept_lengths) == LIMIT
        assert generation.finish == "length"
        whole = generation.accept_lengths[:-1]
        if kind == "perfect":
            assert set(whole) == {BLOCK}
        elif kind == "wrong":
            assert set(generation.accept_lengths) == {1}
        else:
            assert list(whole) == [1 + RIGHT[kind](index, n) for n in range(len(whole))]


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_in_a_batch_equals_plain_alone_and_the_uncached_model(
    family: str,
    target_of: Callable[[str], Target],
    answers_of: Callable[[str], list[list[int]]],
    prompts: list[list[int]],
) -> None:
    for batch_size in (1, 4, 6):
        generations, seconds = generate_plain(target_of(family), prompts, max_new_tokens=LIMIT, batch_size=batch_size)
        assert [list(g.output_ids) for g in generations] == [a[:LIMIT] for a in answers_of(family)]
        assert all(g.accept_lengths == () for g in generations)
        assert seconds > 0


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "gemma3"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_random_drafter_is_exact(
    family: str,
    batch_size: int,
    target_of: Callable[[str], Target],
    answers_of: Callable[[str], list[list[int]]],
    prompts: list[list[int]],
) -> None:
    target = target_of(family)
    model, config = drafter(target)
    for block_size in (None, 3):
        generations, _ = generate_speculative(
            target, model, config, prompts, max_new_tokens=15, batch_size=batch_size, block_size=block_size
        )
        assert [list(g.output_ids) for g in generations] == [a[:15] for a in answers_of(family)]


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_a_whole_block_is_drafted_and_its_first_slots_are_verified(
    family: str,
    target_of: Callable[[str], Target],
    answers_of: Callable[[str], list[list[int]]],
    prompts: list[list[int]],
) -> None:
    """The first drafts are then those of the trained block, and the answer is what it always is."""
    target = target_of(family)
    model, config = drafter(target)
    whole = DrafterProposer(target, model, config, whole_block=True)
    part = DrafterProposer(target, model, config)
    ids = torch.tensor(prompts[1:2])
    with torch.inference_mode():
        with tap_layers(target, config.target_layer_ids) as taps:
            target.model(ids, use_cache=False)
        for proposer in (whole, part):
            proposer.start([0], [ids.shape[1]], taps.features(), 64)
        draft, widths = model.draft, []
        model.draft = lambda noise, *rest, **named: widths.append(noise.shape[1]) or draft(noise, *rest, **named)
        trained, first, short = (
            p.propose(torch.tensor([7]), [ids.shape[1]], drafts).tolist()[0]
            for p, drafts in ((part, BLOCK - 1), (whole, 2), (part, 2))
        )
    assert widths == [BLOCK, BLOCK, 3]
    assert first == trained[:2]
    assert len(short) == 2
    for batch_size in (1, 3):
        decoded = decode_speculative(target, whole, prompts, block_size=3, max_new_tokens=15, batch_size=batch_size)
        assert [list(g.output_ids) for g in decoded.generations] == [a[:15] for a in answers_of(family)]


@pytest.mark.parametrize("batch_size", [1, 6])
def test_eos_inside_an_accepted_block_ends_the_response(
    batch_size: int,
    target_of: Callable[[str], Target],
    altered: Callable[..., Target],
    answers_of: Callable[[str], list[list[int]]],
    prompts: list[list[int]],
) -> None:
    answers = answers_of("qwen3_5")
    # A different stop token for each place in a block: as accepted draft, as bonus, as the first token.
    for place in (0, 3, 8, 9, 12):
        eos = answers[2][place]
        target = altered(target_of("qwen3_5"), eos)
        decoded = decode_speculative(
            target,
            Oracle(prompts, answers, RIGHT["perfect"]),
            prompts,
            block_size=BLOCK,
            max_new_tokens=LIMIT,
            batch_size=batch_size,
        )
        for answer, generation in zip(answers, decoded.generations, strict=True):
            end = answer.index(eos) + 1 if eos in answer[:LIMIT] else LIMIT
            assert list(generation.output_ids) == answer[:end]
            assert generation.finish == ("eos" if eos in answer[:LIMIT] else "length")
            assert 1 + sum(generation.accept_lengths) == end
            assert generation.cut == (end > 1 and (end - 1) % BLOCK != 0)


@pytest.mark.parametrize("limit", [1, 2, 8, 9, 10])
def test_token_limits_inside_and_at_the_edge_of_a_block(
    limit: int,
    target_of: Callable[[str], Target],
    answers_of: Callable[[str], list[list[int]]],
    prompts: list[list[int]],
) -> None:
    answers = answers_of("qwen3")
    decoded = decode_speculative(
        target_of("qwen3"),
        Oracle(prompts, answers, RIGHT["perfect"]),
        prompts,
        block_size=BLOCK,
        max_new_tokens=limit,
        batch_size=4,
    )
    assert [list(g.output_ids) for g in decoded.generations] == [a[:limit] for a in answers]
    assert all(g.cut == ((limit - 1) % BLOCK != 0) for g in decoded.generations)


def test_a_response_may_fill_the_targets_last_position(
    target_of: Callable[[str], Target],
    altered: Callable[..., Target],
    answers_of: Callable[[str], list[list[int]]],
    prompts: list[list[int]],
) -> None:
    target = altered(target_of("llama"), max_positions=len(prompts[4]) + 20)
    decoded = decode_speculative(
        target, Oracle(prompts, answers_of("llama"), RIGHT["mixed"]), prompts, block_size=BLOCK, max_new_tokens=20
    )
    assert [list(g.output_ids) for g in decoded.generations] == [a[:20] for a in answers_of("llama")]


class Spy(DrafterProposer):
    """Records what the drafter computed for each block."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.seen: list[tuple[int, int, int, list[int]]] = []
        self.indices: list[int] = []

    def start(self, indices: Any, lengths: Any, features: Any, capacity: int) -> None:
        self.indices = list(indices)
        super().start(indices, lengths, features, capacity)

    def propose(self, anchors: torch.Tensor, starts: Any, drafts: int) -> torch.Tensor:
        proposed = super().propose(anchors, starts, drafts)
        for index, start, anchor, row in zip(self.indices, starts, anchors.tolist(), proposed.tolist(), strict=True):
            self.seen.append((index, start, anchor, row))
        return proposed

    def keep(self, rows: Any) -> None:
        self.indices = [self.indices[i] for i in rows]
        super().keep(rows)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen3_5", {}),
        ("gemma3", {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 9}),
    ],
)
def test_the_context_is_the_committed_tokens_before_the_anchor_and_nothing_else(
    family: str, changes: dict[str, Any], target_of: Callable[[str], Target], prompts: list[list[int]]
) -> None:
    """Every draft equals the drafter's pass over features of the true prefix, read anew without cache."""
    target = target_of(family)
    model, config = drafter(target, **changes)
    spy = Spy(target, model, config)
    decoded = decode_speculative(target, spy, prompts, block_size=BLOCK, max_new_tokens=12, batch_size=4)
    assert len(spy.seen) == decoded.row_rounds
    for index, start, anchor, proposed in spy.seen:
        generation = decoded.generations[index]
        text = [*generation.prompt_ids, *generation.output_ids]
        assert text[start] == anchor
        with torch.inference_mode():
            with tap_layers(target, config.target_layer_ids) as taps:
                target.parts.decoder(input_ids=torch.tensor([text[:start]]), use_cache=False)
            context = torch.arange(start)[None]
            block = torch.tensor([[anchor] + [config.mask_token_id] * (BLOCK - 1)])
            hidden = model.draft(
                target.embed(block),
                start + torch.arange(BLOCK)[None],
                model.context_kv(taps.features(), context),
                context_positions=context,
            )
            assert target.head(hidden[0, 1:]).argmax(-1).tolist() == proposed


def test_seconds_and_rounds_are_counted(
    target_of: Callable[[str], Target], answers_of: Callable[[str], list[list[int]]], prompts: list[list[int]]
) -> None:
    finished: list[tuple[int, int]] = []
    decoded = decode_speculative(
        target_of("qwen3"),
        Oracle(prompts, answers_of("qwen3"), RIGHT["perfect"]),
        prompts,
        block_size=BLOCK,
        max_new_tokens=17,
        batch_size=3,
        progress=lambda done, total: finished.append((done, total)),
    )
    assert (decoded.rounds, decoded.row_rounds) == (4, 12)
    assert 0 < decoded.prefill_seconds < decoded.seconds
    assert finished == [(n, 6) for n in range(1, 7)]


BAD_PROMPTS = {
    "no prompt": ([], {}, "there is no prompt"),
    "empty prompt": ([[1], []], {}, "prompt 1 is empty"),
    "outside the embedding": ([[1, 320]], {}, r"prompt 0 holds token 320.*0\.\.319"),
    "negative": ([[-1]], {}, "prompt 0 holds token -1"),
    "too long": ([[1] * 500], {}, r"500 tokens and max_new_tokens is 20.*512 positions.*to 12"),
    "no token wanted": ([[1]], {"max_new_tokens": 0}, "max_new_tokens is 0"),
    "no batch": ([[1]], {"batch_size": 0}, "batch_size is 0"),
    "negative temperature": ([[1]], {"temperature": -1.0}, "temperature is -1.0"),
    "temperature nan": ([[1]], {"temperature": float("nan")}, "temperature is nan"),
}


@pytest.mark.parametrize("case", BAD_PROMPTS)
def test_bad_prompts_are_refused_in_one_line(case: str, target_of: Callable[[str], Target]) -> None:
    prompts, options, message = BAD_PROMPTS[case]
    target = target_of("qwen3")
    model, config = drafter(target)
    for run in (
        lambda: generate_plain(target, prompts, **{"max_new_tokens": 20, **options}),
        lambda: generate_speculative(target, model, config, prompts, **{"max_new_tokens": 20, **options}),
    ):
        with pytest.raises(DecodingError, match=message) as caught:
            run()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 128}, "hidden_size is 64 but target .* has 128"),
        ({"vocab_rows": 321}, "vocab_size is 320 but target .* has 321"),
        ({"num_layers": 9}, "num_target_layers is 8 but target .* has 9"),
    ],
)
def test_a_drafter_of_another_target_is_refused(
    changes: dict[str, int], message: str, target_of: Callable[[str], Target], altered: Callable[..., Target]
) -> None:
    target = target_of("qwen3")
    model, config = drafter(target)
    with pytest.raises(DrafterError, match=message):
        generate_speculative(altered(target, **changes), model, config, [[1]], max_new_tokens=4)


@pytest.mark.parametrize("block_size", [0, 1, 9])
def test_block_sizes_outside_the_trained_are_refused(block_size: int, target_of: Callable[[str], Target]) -> None:
    target = target_of("qwen3")
    model, config = drafter(target)
    with pytest.raises(DecodingError, match=f"block_size is {block_size}.*use 2 to 8"):
        generate_speculative(target, model, config, [[1]], max_new_tokens=4, block_size=block_size)


def test_logits_that_are_not_finite_are_named(
    target_of: Callable[[str], Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = target_of("qwen3")
    head = target.head
    monkeypatch.setattr(target, "head", lambda hidden: head(hidden) * float("nan"))
    with pytest.raises(DecodingError, match="logits are not finite for prompt 0 after 0 tokens"):
        generate_plain(target, [[1, 2]], max_new_tokens=4)
