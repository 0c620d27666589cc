"""Whether block decoding wrote what plain decoding wrote, and what a first difference means.

In float32 on one device the two agree, token by token; for that, no kernel that a block goes through may multiply in
TF32 while a single token's does not (``target.rules``). In bfloat16 or float16 they need not: a block of tokens and one
token go through other kernels, their logits differ in the last bits, and where the two best tokens are closer than
that, either may win. Such a *near tie* is told from a fault by measuring how far the target's logits differ between
two ways of computing them, at the very places where the runs parted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from slipstream.decoding.prefill import DecoderCall, prefill
from slipstream.errors import DecodingError
from slipstream.records import Generation
from slipstream.target.kernels import on_device

if TYPE_CHECKING:
    from slipstream.target.model import Target

_PLACES = 4  # differences at which rounding is measured, spread over all of them
_STEPS = 8  # tokens before each
_CANDIDATES = 16  # best tokens that are looked at


@dataclass(frozen=True, kw_only=True)
class Lossless:
    """Responses compared, how many are equal, and the first difference of each other one.

    A difference: ``prompt`` (its number), ``position`` (in the response), ``plain`` and ``speculative`` tokens, and for
    greedy runs with a target ``logit_gap`` (between the two tokens), ``below_top`` (the lower of them to the best),
    ``top2_gap`` and ``near_tie``. ``rounding_noise``: the measured spread of a logit, None where nothing differed.
    """

    responses: int
    equal: int
    first_differences: tuple[dict[str, Any], ...]
    rounding_noise: float | None = None

    @property
    def faults(self) -> tuple[dict[str, Any], ...]:
        """The differences that are no near ties."""
        return faults(self.first_differences)


def faults(differences: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Return the differences that no rounding explains."""
    return tuple(d for d in differences if not d.get("near_tie"))


def compare_lossless(
    plain: Sequence[Generation],
    speculative: Sequence[Generation],
    *,
    target: Target | None = None,
    temperature: float = 0.0,
    batch_size: int = 1,
) -> Lossless:
    """Compare block decoding's responses with plain decoding's, token by token. Call from the target's thread.

    With a ``target`` and temperature 0 each first difference is judged: it is a near tie if neither token's logit is
    further below the best one than ``near_tie_limit`` allows for the measured rounding noise. ``batch_size`` is that of
    the runs: a matrix product of another height may take another kernel, which rounds otherwise.
    """
    found: list[dict[str, Any]] = []
    prefixes: dict[int, list[int]] = {}
    for number, (a, b) in enumerate(zip(plain, speculative, strict=True)):
        if a.prompt_ids != b.prompt_ids:
            raise DecodingError(f"response {number} of the two runs answers different prompts; decode the same prompts")
        if a.output_ids == b.output_ids:
            continue
        at = first_difference(a.output_ids, b.output_ids)
        mine, its = (o[at] if at < len(o) else None for o in (a.output_ids, b.output_ids))
        found.append({"prompt": number, "position": at, "plain": mine, "speculative": its})
        if mine is not None and its is not None:
            prefixes[len(found) - 1] = [*a.prompt_ids, *a.output_ids[:at]]
    noise = None
    if target is not None and temperature == 0 and prefixes:
        noise = _judge(target, found, prefixes, batch_size)
    return Lossless(
        responses=len(plain), equal=len(plain) - len(found), first_differences=tuple(found), rounding_noise=noise
    )


def first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the index of the first token that differs; the shorter length if one begins with the other."""
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


def near_tie_limit(noise: float, top: float, dtype: torch.dtype) -> float:
    """Return how far below the best logit ``top`` a token may be and still have won by rounding alone.

    Three times the measured ``noise``: a logit may be off by it one way in one run, the other way in the other, and the
    measurement sees a few places only. At least two units in the last place of a logit of that size in ``dtype``, since
    each of two logits may round one unit apart; at most eight, so that a target whose own ways of computing disagree
    does not excuse everything.
    """
    unit = torch.finfo(dtype).eps * abs(top)
    return min(max(3 * noise, 2 * unit), 8 * unit)


@torch.inference_mode()
def _judge(target: Target, found: list[dict[str, Any]], prefixes: dict[int, list[int]], rows: int) -> float:
    """Add to each difference how close its two tokens are; return the rounding noise."""
    call = DecoderCall(target)
    every = list(prefixes)
    with on_device(target.device):
        noise = max(_rounding_noise(call, prefixes[i], rows) for i in every[:: -(-len(every) // _PLACES)])
        for index, prefix in prefixes.items():
            logits = prefill(call, [prefix], None).logits[0]
            difference = found[index]
            pair = logits[[difference["plain"], difference["speculative"]]].float()
            top = logits.float().topk(2).values
            # Both must be near the top: two tokens that are alike, but far below it, are a fault.
            below = float(top[0] - pair.min())
            difference["logit_gap"] = float((pair[0] - pair[1]).abs())
            difference["below_top"] = below
            difference["top2_gap"] = float(top[0] - top[1])
            difference["near_tie"] = below <= near_tie_limit(noise, float(top[0]), logits.dtype)
    return noise


def _rounding_noise(call: DecoderCall, prefix: Sequence[int], rows: int) -> float:
    """Return the largest difference of a leading token's logit among four ways of computing it.

    In one pass and token by token, each for one row alone and for ``rows`` rows and a longer one, so that they are
    padded and masked: matrix products of other heights, and attention with a mask, take kernels that round otherwise.
    Seen at the last ``_STEPS`` tokens of ``prefix``, for the best ``_CANDIDATES`` tokens of each way. None of them is
    block decoding's own, so a fault of that cannot widen what is called rounding.
    """
    steps = min(_STEPS, len(prefix) - 1)
    if steps < 1:
        return 0.0
    longer = [*prefix[:1], *prefix]
    ways = []
    for batch in ([list(prefix)], [list(prefix)] * rows + [longer]):
        ways += [_at_once(call, batch, steps), _one_by_one(call, batch, steps)]
    logits = torch.stack(ways).float()
    best = logits.topk(min(_CANDIDATES, logits.shape[-1])).indices
    best = torch.cat(list(best), dim=-1).expand(len(ways), -1, -1)
    seen = logits.gather(-1, best)
    return float((seen.amax(0) - seen.amin(0)).max())


def _at_once(call: DecoderCall, batch: list[list[int]], steps: int) -> Tensor:
    """Return row 0's logits ``[steps, V]`` at its last tokens, from one pass over the left-padded batch."""
    width = max(map(len, batch))
    ids = torch.tensor([[0] * (width - len(b)) + b for b in batch], device=call.target.device)
    columns = torch.arange(width, device=ids.device)
    pads = torch.tensor([width - len(b) for b in batch], device=ids.device)[:, None]
    mask = (columns >= pads).long() if len(batch) > 1 else None
    hidden = call(ids, positions=(columns - pads).clamp(min=0), mask=mask, cache=call.new_cache())
    return call.target.head(hidden[:1, -steps:])[0]


def _one_by_one(call: DecoderCall, batch: list[list[int]], steps: int) -> Tensor:
    """Return the same, from a pass over what stands before and a cached pass for each of the last tokens."""
    state = prefill(call, [b[:-steps] for b in batch], None)
    ids = torch.tensor([b[-steps:] for b in batch], device=call.target.device)
    first = torch.tensor(state.lengths, device=ids.device)[:, None]
    mask, rows = state.mask, len(batch)
    found = []
    for step in range(steps):
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(rows, 1)], dim=1)
        hidden = call(ids[:, step : step + 1], positions=first + step, mask=mask, cache=state.cache)
        found.append(call.target.head(hidden[:1, 0])[0])
    return torch.stack(found)
