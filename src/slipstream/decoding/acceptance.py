"""What decoding measured: acceptance, and speed beside plain decoding and the free drafters.

How passes are counted, here and in ``baselines``: a *whole* pass counts what it committed, the bonus token included.
The last pass of a response is *cut* when it had accepted more than the response could take (eos or the token limit
stood inside the accepted block). A cut pass says nothing about how far the drafts agreed, so it is left out of tau,
positions and histogram; it stays in every measurement of speed. A perfect drafter so has tau = B. Only if a run has
no whole pass at all are cut passes counted, with what they kept (``cut_passes_counted`` is then true).

* tau: committed tokens / whole passes, over all responses (token-weighted);
* tau of all passes: the same over every pass, cut ones with what they kept: tokens per target pass as they were paid
  for, and what a server that counts every step shows. It is lower, the more so the shorter the responses;
* tau per response: mean of each response's own tokens / whole passes; a response whose only pass was cut counts with
  what that kept, so that short responses are not left out; one that ended with its first token has no pass;
* acceptance by position k = 1..B-1: share of passes that accepted at least k drafts (cumulative), so that
  tau = 1 + sum of them;
* histogram: passes that committed 1..B tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slipstream.decoding.baselines import baseline_taus
from slipstream.decoding.equipment import Equipment, equipped
from slipstream.decoding.losslessness import compare_lossless
from slipstream.decoding.plain import decode_plain
from slipstream.decoding.proposer import DrafterProposer, Proposer, resolve_block_size
from slipstream.decoding.responses import Decoded, Progress
from slipstream.decoding.speculative import decode_speculative
from slipstream.errors import DecodingError
from slipstream.records import EvalResult, Generation

if TYPE_CHECKING:
    from slipstream.config import EvaluationConfig
    from slipstream.drafter.config import DrafterConfig
    from slipstream.drafter.model import DraftModel
    from slipstream.target.model import Target


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """Acceptance of a run; the module's text defines each number."""

    tau: float
    tau_all_passes: float
    tau_per_response: float
    acceptance_by_position: tuple[float, ...]
    histogram: tuple[int, ...]
    passes: int
    cut_passes: int
    cut_passes_counted: bool


def summarise(generations: Sequence[Generation], block_size: int) -> Acceptance:
    """Return the acceptance of block decoding's generations. Pure; thread-safe.

    Raises DecodingError when there is no pass at all: every response ended with its first token.
    """
    whole: list[tuple[int, ...]] = []
    cut_passes = 0
    for generation in generations:
        cut = bool(getattr(generation, "cut", False))
        cut_passes += cut
        whole.append(generation.accept_lengths[:-1] if cut else generation.accept_lengths)
    none_whole = not any(whole)
    if none_whole:
        whole = [g.accept_lengths for g in generations]
    lengths = [n for response in whole for n in response]
    if not lengths:
        raise DecodingError(
            f"all {len(generations)} responses ended with their first token, so acceptance cannot be measured; "
            "use other prompts or raise evaluation.max_new_tokens"
        )
    histogram = tuple(lengths.count(n) for n in range(1, block_size + 1))
    every = [n for g in generations for n in g.accept_lengths]
    own = [sum(r) / len(r) for r in (w or g.accept_lengths for w, g in zip(whole, generations, strict=True)) if r]
    return Acceptance(
        tau=sum(lengths) / len(lengths),
        tau_all_passes=sum(every) / len(every),
        tau_per_response=sum(own) / len(own),
        acceptance_by_position=tuple(sum(histogram[k:]) / len(lengths) for k in range(1, block_size)),
        histogram=histogram,
        passes=len(lengths),
        cut_passes=cut_passes,
        cut_passes_counted=none_whole,
    )


def evaluate(
    target: Target,
    draft_model: DraftModel,
    config: DrafterConfig,
    prompts: Sequence[Sequence[int]],
    settings: EvaluationConfig,
    *,
    table_ids: Sequence[Sequence[int]] | None = None,
    progress: Progress | None = None,
    seed: int = 0,
    block_size: int | None = None,
) -> EvalResult:
    """Measure a drafter by real block decoding. Call from the target's thread; nothing is trained or changed.

    Plain decoding and block decoding answer the same prompts at the same batch size; the free drafters walk over plain
    decoding's answers, in blocks of the drafter's size. Speed-up is the ratio of measured tokens per second, prefill
    included in both.

    Args:
        prompts: token ids; ``settings.max_prompts`` above 0 takes the first so many.
        table_ids: training sequences for the bigram and trigram tables; without them those baselines are left out.
        progress: called with (finished, all) over both runs: all is twice the number of prompts.
        seed: of the sampling when ``settings.temperature`` is above 0.
        block_size: shorter than trained, or None. ``settings`` names sizes for the ``evaluate`` command alone.

    Raises:
        DecodingError, DrafterError: as ``generate_speculative``.
    """
    size = resolve_block_size(config, block_size)
    proposer = DrafterProposer(target, draft_model, config, whole_block=settings.draft_whole_block)
    chosen = list(prompts[: settings.max_prompts] if settings.max_prompts > 0 else prompts)
    options: dict[str, Any] = {"temperature": settings.temperature, "seed": seed, "batch_size": settings.batch_size}

    def part(offset: int) -> Progress | None:
        if progress is None:
            return None
        return lambda finished, total: progress(offset + finished, 2 * total)

    limit = settings.max_new_tokens
    with equipped(target, draft_model) as made:
        _warm_up(target, proposer, chosen, size, settings, options)
        plain = decode_plain(target, chosen, max_new_tokens=limit, progress=part(0), **options)
        spec = decode_speculative(
            target, proposer, chosen, block_size=size, max_new_tokens=limit, progress=part(len(chosen)), **options
        )
        # With the same equipment, since rounding is to be measured as the runs had it.
        lossless = compare_lossless(
            plain.generations,
            spec.generations,
            target=target,
            temperature=settings.temperature,
            batch_size=min(settings.batch_size, len(chosen)),
        )
    accepted = summarise(spec.generations, size)
    answers = [g.output_ids for g in plain.generations]
    return EvalResult(
        tau=accepted.tau,
        tau_per_response=accepted.tau_per_response,
        acceptance_by_position=accepted.acceptance_by_position,
        histogram=accepted.histogram,
        lossless_responses=lossless.responses,
        lossless_equal=lossless.equal,
        first_differences=lossless.first_differences,
        tokens_per_second=_tokens(spec) / spec.seconds,
        baseline_tokens_per_second=_tokens(plain) / plain.seconds,
        baselines=baseline_taus(chosen, answers, table_ids or [], size),
        prompts=len(chosen),
        generated_tokens=_tokens(spec),
        temperature=settings.temperature,
        block_size=size,
        batch_size=settings.batch_size,
        max_new_tokens=limit,
        details={
            "trained_block_size": config.block_size,
            "drafted_block_size": config.block_size if settings.draft_whole_block else size,
            "baselines_block_size": size,
            "passes": accepted.passes,
            "cut_passes": accepted.cut_passes,
            "cut_passes_counted": accepted.cut_passes_counted,
            "tau_all_passes": accepted.tau_all_passes,
            "near_ties": len(lossless.first_differences) - len(lossless.faults),
            "rounding_noise": lossless.rounding_noise,
            "target_dtype": target.info.dtype,
            "unfinished": sum(g.finish == "length" for g in spec.generations),
            "seconds": spec.seconds,
            "baseline_seconds": plain.seconds,
            "prefill_seconds": spec.prefill_seconds,
            "baseline_prefill_seconds": plain.prefill_seconds,
            **_break_even(plain, spec),
            **_equipment(target, made),
        },
    )


def _tokens(decoded: Decoded) -> int:
    """Return how many tokens a run wrote."""
    return sum(len(g.output_ids) for g in decoded.generations)


def _break_even(plain: Decoded, spec: Decoded) -> dict[str, float | None]:
    """Return an estimate of the tau at which block decoding is as fast as plain decoding, and the speed-up after it.

    ``break_even_tau`` is the cost of a draft-verify round over the cost of a plain step, each per row that took part
    and without prefill, so rows that finished early weigh in neither. ``speedup_after_prefill``: the ratio of tokens
    per second once the prompts are read, which both runs do alike; short answers to long prompts hide it in the
    speed-up as a whole. None where a run had no step.
    """
    if not (plain.row_rounds and spec.row_rounds):
        names = ("round_milliseconds", "plain_step_milliseconds", "break_even_tau", "speedup_after_prefill")
        return dict.fromkeys(names)
    costs = [(d.seconds - d.prefill_seconds) / d.row_rounds for d in (plain, spec)]
    # The prefill's own tokens are left out, one a response.
    speeds = [(_tokens(d) - len(d.generations)) / (d.seconds - d.prefill_seconds) for d in (plain, spec)]
    return {
        "speedup_after_prefill": speeds[1] / speeds[0] if speeds[0] > 0 else None,
        "round_milliseconds": 1e3 * (spec.seconds - spec.prefill_seconds) / spec.rounds,
        "plain_step_milliseconds": 1e3 * (plain.seconds - plain.prefill_seconds) / plain.rounds,
        "break_even_tau": costs[1] / costs[0] if costs[0] > 0 else None,
    }


def _equipment(target: Target, made: Equipment) -> dict[str, Any]:
    """Return in which way both runs went through the target's layers on a CPU; a GPU has its own kernels."""
    if target.device.type != "cpu":
        return {}
    blocks = made.short_blocks
    return {
        "linear_layers": made.linears or "laid out once",
        "recurrent_layers": blocks.refused or ("short blocks" if blocks.proven else "own forward"),
    }


def _warm_up(
    target: Target,
    proposer: Proposer,
    prompts: Sequence[Sequence[int]],
    block_size: int,
    settings: EvaluationConfig,
    options: dict[str, Any],
) -> None:
    """Decode a little with both, so that first-call costs (allocation, kernel choice) enter neither measurement."""
    on_gpu = target.device.type == "cuda"
    few = sorted(prompts, key=len)[-settings.batch_size :] if on_gpu else sorted(prompts, key=len)[:1]
    limit = min(settings.max_new_tokens, 4 * block_size if on_gpu else 2)
    decode_plain(target, few, max_new_tokens=limit, **options)
    decode_speculative(target, proposer, few, block_size=block_size, max_new_tokens=limit, **options)
