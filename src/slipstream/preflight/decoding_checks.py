"""``overfit``, ``lossless``: what training teaches is what decoding uses, and decoding never changes the output."""

from __future__ import annotations

import copy
import dataclasses
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.decoding.acceptance import summarise
from slipstream.decoding.losslessness import compare_lossless
from slipstream.decoding.speculative import generate_plain, generate_speculative
from slipstream.drafter.anchors import Blocks, blocks_at, sample_blocks, valid_anchors
from slipstream.drafter.model import DraftModel
from slipstream.preflight.replay import reproducible_answers
from slipstream.preflight.report import CheckFailure
from slipstream.preflight.subject import Document, Subject, reduced_run
from slipstream.records import FeatureBatch, StepResult
from slipstream.training.optimizer import Updater, build_optimizer
from slipstream.training.session import PreparedRun
from slipstream.training.step import anchor_generator, training_step

RESPONSE = 32  # tokens after the first, rounded up to whole blocks
PROMPT = 48
TRIED_PROMPTS = 6
LEARNING_RATE = 3e-3
MUON_LEARNING_RATE = 0.02
SECONDS = 240.0  # a quiet machine needs a tenth; a busy one must not be told that it does not learn
MOST_STEPS = 600
# Relative difference of the drafter's states: below float32, and in float32 throughout.
STATES_APART = (0.25, 0.01)
_EVERY = 10


@dataclass(frozen=True)
class Sample:
    """A prompt, the target's own greedy answer to it, and the best tau that the answer's length allows."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    best: float


def best_tau(answer: int, block_size: int) -> float:
    """Return the largest tau for an answer of so many tokens: the first is the prefill's, the last pass may be cut."""
    left = answer - 1
    return left / math.ceil(left / block_size) if left > 0 else 0.0


def prompts_of(subject: Subject, count: int) -> list[list[int]]:
    """Return what stands before the first answer of so many documents, its end at most."""
    found: list[list[int]] = []
    for ids, mask in subject.run.dataset.documents():
        starts = mask.nonzero()[0]
        if len(starts):
            end = max(int(starts[0]), 1)
            found.append([int(i) for i in ids[max(end - PROMPT, 0) : end]])
        if len(found) == count:
            break
    return found


def _sample(subject: Subject) -> Sample:
    """Let the target answer a few prompts greedily and take the longest answer; of several, the most varied one."""
    run, block = subject.run, subject.run.config.block_size
    limit = 1 + block * max(math.ceil(RESPONSE / block), 2)
    prompts = prompts_of(subject, TRIED_PROMPTS)
    answers = reproducible_answers(run.target, prompts, block_size=block, max_new_tokens=limit)
    best = max(answers, key=lambda a: (len(a.output_ids), len(set(a.output_ids))))
    if len(best.output_ids) < 3:
        raise CheckFailure(
            f"the target ends its answers to {len(prompts)} prompts after {len(best.output_ids)} tokens, or parts from "
            f"them at a near tie in {run.target.info.dtype}; give data.train prompts that it answers, or set "
            "target.dtype = float32"
        )
    return Sample(best.prompt_ids, best.output_ids, best_tau(len(best.output_ids), block))


def train_on(run: PreparedRun, *, seconds: float, most_steps: int) -> tuple[int, float]:
    """Train ``run.draft_model`` on all rows of its data at once, until it knows them by heart.

    Returns the steps and the share of supervised slots that are right, teacher-forced, over all anchors. Every step
    is the real one: ``sample_blocks``, ``training_step``, ``build_optimizer``, ``Updater``.
    """
    training = run.recipe.training
    optimizer = build_optimizer(run.draft_model, training)
    updater = Updater(optimizer, clip_norm=training.clip_norm)
    features = run.reader.read(run.dataset.batch(0, training.rows, run.recipe.run.seed))
    began, right = time.monotonic(), 0.0
    for step in range(most_steps):
        blocks = sample_blocks(
            features.batch,
            anchors=training.anchors,
            block_size=run.config.block_size,
            mask_token_id=run.config.mask_token_id,
            generator=anchor_generator(run.recipe.run.seed, step, 0),
        )
        result = _step(run, features, blocks)
        result.loss_sum.backward()
        factor = min((step + 1) / 10, 1.0)
        updater.apply(step=step, factor=factor, loss_sum=result.loss_sum.detach(), weight_sum=result.weight_sum)
        if (step + 1) % _EVERY == 0:
            if updater.fault() is not None:
                raise CheckFailure(f"the loss or its gradient is not finite at step {step}")
            # All anchors are looked at only when those of this step are right: that costs several steps.
            right = int(result.correct_by_slot.sum()) / max(int(result.valid_by_slot.sum()), 1)
            if right == 1.0:
                right = teacher_forced(run, features)
            if right == 1.0 or time.monotonic() - began > seconds:
                return step + 1, right
    return most_steps, right


def _step(run: PreparedRun, features: FeatureBatch, blocks: Blocks) -> StepResult:
    run.attention.update(blocks.anchors, blocks.document_start, blocks.keep)
    target = run.target
    return training_step(
        run.draft_model, target.embed, target.head_weight, features, blocks, run.attention,
        settings=run.settings, head=target.head,
    )  # fmt: skip


@torch.no_grad()
def teacher_forced(run: PreparedRun, features: FeatureBatch) -> float:
    """Return the share of supervised slots that are right, over every anchor of every row in turn."""
    batch, width = features.batch, run.recipe.training.anchors
    valid = valid_anchors(batch)
    most = int(valid.sum(1).max())
    # Valid tokens first, in rising order; the row's last index, which is never valid, fills up.
    order = torch.argsort((~valid).to(torch.int8), dim=1, stable=True)
    order = torch.where(valid.gather(1, order), order, batch.ids.shape[1] - 1)
    filled = torch.nn.functional.pad(order[:, :most], (0, -most % width), value=batch.ids.shape[1] - 1)
    correct = supervised = 0
    for anchors in filled.split(width, dim=1):
        keep = anchors < batch.ids.shape[1] - 1
        blocks = blocks_at(
            batch, anchors, keep, block_size=run.config.block_size, mask_token_id=run.config.mask_token_id
        )
        result = _step(run, features, blocks)
        correct += int(result.correct_by_slot.sum())
        supervised += int(result.valid_by_slot.sum())
    return correct / max(supervised, 1)


def overfit_run(
    run: PreparedRun, samples: Sequence[Sample], *, anchors: int = 8, learning_rate: float = 0.0
) -> PreparedRun:
    """Return a run whose rows are the samples, one each, answers supervised, all of them in every micro-batch."""
    documents = [
        Document((*s.prompt, *s.answer), (*([False] * len(s.prompt)), *([True] * len(s.answer)))) for s in samples
    ]
    longest = max(len(d.ids) for d in documents)
    # Of the target's distribution alone, several tokens may be equally right; half of a label says which one is.
    settings = dataclasses.replace(run.settings, soft_share=min(run.settings.soft_share, 0.5))
    return reduced_run(
        dataclasses.replace(run, settings=settings),
        documents,
        one_each=True,
        row_length=max(-(-longest // 16) * 16, run.config.block_size),
        rows=len(documents),
        anchors=anchors,
        accumulation=1,
        draws_per_prefill=1,
        weight_decay=0.0,
        learning_rate=learning_rate or LEARNING_RATE,
        muon_learning_rate=MUON_LEARNING_RATE,
    )


def overfitted(subject: Subject) -> tuple[PreparedRun, Sample, int, float]:
    """Return a small run whose drafter has been trained on one sample, the sample, the steps and the share right."""
    if "overfitted" not in subject.shared:
        sample = _sample(subject)
        run = overfit_run(subject.run, [sample])
        steps, right = train_on(run, seconds=SECONDS, most_steps=MOST_STEPS)
        subject.shared["overfitted"] = (run, sample, steps, right)
    found: tuple[PreparedRun, Sample, int, float] = subject.shared["overfitted"]
    return found


def decoding_model(run: PreparedRun) -> DraftModel:
    """Return the drafter as decoding uses it: in the target's dtype."""
    return copy.deepcopy(run.draft_model).to(run.target.dtype).eval()


def overfit(subject: Subject) -> str:
    """One short answer of the target, learned by heart, is decoded at the largest tau that there is."""
    run, sample, steps, right = overfitted(subject)
    if right < 1.0 and steps < MOST_STEPS:
        raise CheckFailure(
            f"after {SECONDS:.0f} s and {steps} steps on one answer of {len(sample.answer)} tokens {right:.0%} of the "
            "slots are right: out of time, so nothing is proven; free the machine, raise run.threads, or set "
            "target.dtype = bfloat16"
        )
    if right < 1.0:
        raise CheckFailure(
            f"after {steps} steps on one answer of {len(sample.answer)} tokens only {right:.0%} of the slots are "
            "right: the drafter "
            "does not learn; check labels, gradients, the loss and target.path's features"
        )
    drafter = decoding_model(run)
    with _states(drafter) as decoded:
        (spoken,), _ = generate_speculative(
            run.target, drafter, run.config, [sample.prompt], max_new_tokens=len(sample.answer)
        )
    passes = spoken.accept_lengths
    tau = sum(passes) / len(passes) if passes else 0.0
    if abs(tau - sample.best) > 1e-9:
        raise CheckFailure(
            f"every slot is right in training, yet decoding accepts tau = {tau:.2f} of {sample.best:.2f} (passes "
            f"{list(passes)}): "
            "labels, positions, context or mask tokens differ between training and decoding"
        )
    apart = _apart(run, sample, passes, decoded)
    limit = STATES_APART[run.target.dtype == torch.float32 and run.settings.precision == torch.float32]
    if apart > limit:
        raise CheckFailure(
            f"the answer is decoded, but the drafter's states are not those of training ({apart:.2g} of their size "
            f"apart, limit {limit}): positions, context or mask tokens differ between training and decoding"
        )
    return (
        f"tau = {tau:.2f} of block {run.config.block_size} on {len(sample.answer)} tokens after {steps} steps; states "
        f"in decoding within {apart:.1e} of training's"
    )


@contextmanager
def _states(model: DraftModel) -> Iterator[list[Tensor]]:
    """Collect what the drafter's last norm gives: states ``[R, Q, H]``, one tensor a call."""
    found: list[Tensor] = []
    handle = model.norm.register_forward_hook(lambda _module, _args, out: found.append(out.detach().float()))
    try:
        yield found
    finally:
        handle.remove()


def _apart(run: PreparedRun, sample: Sample, passes: Sequence[int], decoded: Sequence[Tensor]) -> float:
    """Return the largest relative difference of a block's states between decoding and the training step.

    A drafter that knows an answer by heart may find it whatever its context is; its states show what it was given.
    """
    features = run.reader.read(run.dataset.batch(0, 1, run.recipe.run.seed))
    starts = [len(sample.prompt) + sum(passes[:n]) for n in range(len(passes))][: run.recipe.training.anchors]
    anchors = torch.tensor([starts], device=features.features.device)
    block = run.config.block_size
    keep = torch.ones_like(anchors, dtype=torch.bool)
    missing = run.recipe.training.anchors - len(starts)
    blocks = blocks_at(
        features.batch,
        torch.nn.functional.pad(anchors, (0, missing), value=features.batch.ids.shape[1] - 1),
        torch.nn.functional.pad(keep, (0, missing)),
        block_size=block,
        mask_token_id=run.config.mask_token_id,
    )
    with torch.no_grad(), _states(run.draft_model) as trained:
        _step(run, features, blocks)
    mine = torch.cat([states[0] for states in decoded[: len(starts)]]).view(len(starts), block, -1)
    its = trained[0][0].view(-1, block, mine.shape[-1])[: len(starts)]
    return float(((mine - its).norm(dim=-1) / its.norm(dim=-1).clamp_min(1e-12)).max())


def lossless(subject: Subject) -> str:
    """Greedy block decoding writes what plain greedy decoding writes, whatever the drafts are worth."""
    run, sample, _, _ = overfitted(subject)
    # Its own answer from three places, other prompts, weights with noise: passes of every length, ragged in a batch.
    prompts = [list(sample.prompt), [*sample.prompt, *sample.answer[:2]], [*sample.prompt, *sample.answer[:5]]]
    prompts += [p for p in prompts_of(subject, TRIED_PROMPTS) if p != list(sample.prompt)][:2]
    prompts = [p for p in prompts if len(p)]
    limit = min(20, len(sample.answer) + 8)
    plain, _ = generate_plain(run.target, prompts, max_new_tokens=limit, batch_size=len(prompts))
    noisy = decoding_model(run)
    generator = torch.Generator("cpu").manual_seed(0)
    with torch.no_grad():
        weight = noisy.fc.weight
        draw = torch.randn(weight.shape, generator=generator).to(weight.device, weight.dtype)
        weight.add_(draw * weight.float().std().to(weight.dtype) * 0.3)
    block = run.config.block_size
    spoken, _ = generate_speculative(
        run.target, noisy, run.config, prompts, max_new_tokens=limit, batch_size=len(prompts)
    )
    result = compare_lossless(plain, spoken, target=run.target, batch_size=len(prompts))
    exact = run.target.dtype == torch.float32
    for difference in result.first_differences if exact else result.faults:
        raise CheckFailure(
            f"block decoding differs from plain decoding in response {difference['prompt']} at token "
            f"{difference['position']} ({difference['speculative']} for {difference['plain']}, logits "
            f"{difference.get('logit_gap', float('nan')):.3g} apart in {run.target.info.dtype}): acceptance or the "
            "rollback of the target's state is wrong"
        )
    seen = summarise(spoken, block).histogram
    lengths = ", ".join(f"{n + 1}: {count}" for n, count in enumerate(seen) if count)
    ties = f", the other {len(result.first_differences)} part at a near tie" if result.first_differences else ""
    return (
        f"{result.equal} of {result.responses} responses equal plain decoding token by token in "
        f"{run.target.info.dtype}{ties}; tokens a pass: {lengths}"
    )
