"""Plain cached decoding, one token a pass: the reference for losslessness and the baseline for speed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from slipstream.decoding.equipment import equipped
from slipstream.decoding.growing import GrowingAnswers
from slipstream.decoding.prefill import DecoderCall, prefill
from slipstream.decoding.responses import Decoded, Progress, Response, batches, check_prompts, kept_rows
from slipstream.decoding.sampling import check_temperature, choose, uniforms
from slipstream.decoding.steps import StepState
from slipstream.records import Generation
from slipstream.target.kernels import on_device

if TYPE_CHECKING:
    from slipstream.target.model import Target


def generate_plain(
    target: Target,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    batch_size: int = 8,
    progress: Progress | None = None,
    first_index: int = 0,
) -> tuple[list[Generation], float]:
    """Decode with the target alone. Call from the target's thread.

    Args:
        target: the model, in eval mode on its device.
        prompts: token ids, each prompt at least one token.
        max_new_tokens: limit of a response; eos (any of the target's) ends it earlier and is kept.
        temperature: 0 is greedy; above it tokens are sampled from softmax(logits / temperature).
        seed: with the prompt's index it fixes the sampling, whatever the batch.
        batch_size: prompts decoded at once.
        progress: called with (finished, all) whenever a response ends.
        first_index: index of the first prompt, for callers that decode a long list in pieces.

    Returns:
        the generations in the order of the prompts, and wall seconds (prefill included, device synchronised).

    Raises:
        DecodingError: an empty prompt, a token outside the embedding, too many positions, non-finite logits.
    """
    decoded = decode_plain(
        target,
        prompts,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        batch_size=batch_size,
        progress=progress,
        first_index=first_index,
    )
    return decoded.generations, decoded.seconds


@torch.inference_mode()
def decode_plain(
    target: Target,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    batch_size: int = 8,
    progress: Progress | None = None,
    first_index: int = 0,
) -> Decoded:
    """As ``generate_plain``, with the cost split into prefill and rounds."""
    check_temperature(temperature)
    return decode_batches(
        target,
        prompts,
        lambda call, rows, clock: _decode_batch(call, rows, max_new_tokens, temperature, seed, clock),
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        progress=progress,
        first_index=first_index,
    )


def decode_batches(
    target: Target,
    prompts: Sequence[Sequence[int]],
    decode: Callable[[DecoderCall, list[Response], Clock], list[Response]],
    *,
    max_new_tokens: int,
    batch_size: int,
    progress: Progress | None,
    first_index: int,
    network: nn.Module | None = None,
) -> Decoded:
    """Check the prompts, decode them batch by batch with ``decode`` (to the end of each), and time it all.

    Plain and block decoding share it, so that both pay for the same things, and both have what makes them fast: the
    target and ``network`` (a drafter) are equipped first, untimed.
    """
    check_prompts(prompts, target.info, max_new_tokens=max_new_tokens, batch_size=batch_size)
    call = DecoderCall(target)
    finished: dict[int, Generation] = {}
    clock = Clock(target.device)
    plan = batches(
        prompts,
        batch_size=batch_size,
        max_new_tokens=max_new_tokens,
        eos_ids=target.info.eos_ids,
        first_index=first_index,
    )
    with on_device(target.device), equipped(target, network):
        clock.start()
        for batch in plan:
            for response in decode(call, batch, clock):
                finished[response.index - first_index] = response.as_generation()
                if progress is not None:
                    progress(len(finished), len(prompts))
        clock.stop()
    return clock.decoded([finished[i] for i in range(len(prompts))])


def _decode_batch(
    call: DecoderCall, rows: list[Response], limit: int, temperature: float, seed: int, clock: Clock
) -> list[Response]:
    """Decode one batch; rows that end are dropped, so that the others do not pay for them.

    One host sync a step, and no loop over the rows: which tokens were written.
    """
    device = call.target.device
    started = clock.now()
    state = prefill(call, [r.prompt for r in rows], None)
    noise = draw_noise(rows, seed, limit, temperature, device)
    tokens, finite = choose(state.logits, temperature, None if noise is None else noise[:, 0])
    answers = GrowingAnswers(rows)
    steps = StepState(call, state, limit)
    del state
    with steps:
        for step in range(limit):
            written, ok = torch.stack([tokens, finite.long()]).cpu().numpy()
            answers.take(written, ok.astype(bool))
            if step == 0:
                clock.prefilled(started)
            live = int(answers.live.sum())
            if live == 0:
                break
            keep = kept_rows(answers.live.tolist(), device)
            if keep is not None:
                kept = torch.tensor(keep, device=device)
                tokens = tokens[kept]
                noise = None if noise is None else noise[kept]
                answers.keep(keep)
                steps.keep(keep)
            logits = call.target.head(steps.step(tokens))
            tokens, finite = choose(logits, temperature, None if noise is None else noise[:, step + 1])
            clock.round(live)
    return answers.done


def draw_noise(
    rows: Sequence[Response], seed: int, count: int, temperature: float, device: torch.device
) -> Tensor | None:
    """Return the uniforms of a batch ``[R, count]`` float64 on ``device``, or None when decoding is greedy."""
    if temperature == 0:
        return None
    return torch.stack([uniforms(seed, r.index, count) for r in rows]).to(device)


class Clock:
    """Wall time of a decoding run. The device is synchronised only where a measured span begins or ends."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begin = self._end = 0.0
        self._prefill = 0.0
        self._rounds = self._row_rounds = 0

    def now(self) -> float:
        """Return the time after the device has caught up."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def start(self) -> None:
        """Begin the run."""
        self._begin = self.now()

    def stop(self) -> None:
        """End the run."""
        self._end = self.now()

    def prefilled(self, started: float) -> None:
        """Book the time since ``started`` as prefill."""
        self._prefill += self.now() - started

    def round(self, rows: int) -> None:
        """Count one target pass over ``rows`` rows that have not ended."""
        self._rounds += 1
        self._row_rounds += rows

    def decoded(self, generations: list[Generation]) -> Decoded:
        """Return the run's result."""
        return Decoded(
            generations=generations,
            seconds=self._end - self._begin,
            prefill_seconds=self._prefill,
            rounds=self._rounds,
            row_rounds=self._row_rounds,
        )
