"""``no-leak``, ``packing-parity``, ``empty-batch``: who sees what, read off the gradients of the real training step."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from slipstream.drafter.anchors import Blocks
from slipstream.preflight.report import CheckFailure
from slipstream.preflight.subject import DOCUMENTS, TOKENS, Subject, rows_of
from slipstream.records import FeatureBatch, PackedBatch
from slipstream.training.optimizer import Updater, build_optimizer

FULL = "full_attention"


def no_leak(subject: Subject) -> str:
    """A block's loss depends on its own document's features before its anchor, on its own tokens, and nothing else.

    Row r holds the same four documents, and only one block of document r carries loss. The gradient of that loss with
    respect to the features is exactly zero wherever the block may not look.
    """
    config = subject.run.config
    features = rows_of(subject.packed, DOCUMENTS)
    blocks = subject.blocks(features.batch)
    chosen = _one_block_a_row(blocks, features.batch)
    alone = _only(blocks, chosen, slice(None))
    leaf = features.features.detach().clone().requires_grad_(True)
    subject.step(dataclasses.replace(features, features=leaf), alone).loss_sum.backward()
    assert leaf.grad is not None
    seen = leaf.grad.abs().amax(-1) > 0
    window = 0 if FULL in config.layer_types else config.sliding_window
    _check_seen(seen, alone, chosen, features.batch, window, single=config.layers == 1)

    loss = _loss(subject, features, alone)
    keep = torch.zeros_like(alone.keep)
    keep[torch.arange(DOCUMENTS), chosen] = True
    others = torch.where(keep[..., None], alone.noise_ids, alone.noise_ids.flip(-1))
    changed = _loss(subject, features, dataclasses.replace(alone, noise_ids=others))
    if not torch.equal(loss, changed):
        raise CheckFailure(
            f"a block's loss changed from {float(loss):.6g} to {float(changed):.6g} when other blocks' tokens "
            "changed: blocks "
            "see each other; the attention mask must keep each to itself"
        )
    both_ways = _check_direction(subject, features, _only(blocks, chosen, slice(1)), chosen)
    return (
        f"{DOCUMENTS} blocks in {DOCUMENTS} documents: zero gradient at and after the anchor and outside the "
        f"document; {both_ways}"
    )


def _one_block_a_row(blocks: Blocks, batch: PackedBatch) -> Tensor:
    """Return the index [R] of the last block of document r in row r."""
    document = batch.document_ids.gather(1, blocks.anchors)
    index = torch.arange(blocks.anchors.shape[1], device=document.device)
    chosen = []
    for row in range(DOCUMENTS):
        mine = index[(document[row] == row) & blocks.keep[row]]
        if not len(mine):
            raise CheckFailure(
                f"no block starts in document {row}, which has supervised tokens: anchors are not drawn from "
                "every document"
            )
        chosen.append(int(mine[-1]))
    return torch.tensor(chosen, device=document.device)


def _only(blocks: Blocks, chosen: Tensor, slots: slice) -> Blocks:
    """Return the blocks with some slots of one block a row as the only loss, be there text to be right about or not."""
    valid = torch.zeros_like(blocks.valid)
    valid[torch.arange(len(chosen)), chosen, slots] = True
    return dataclasses.replace(blocks, valid=valid)


def _loss(subject: Subject, features: FeatureBatch, blocks: Blocks) -> Tensor:
    with torch.no_grad():
        return subject.step(features, blocks).loss_sum.detach().clone()


def _check_seen(seen: Tensor, blocks: Blocks, chosen: Tensor, batch: PackedBatch, window: int, *, single: bool) -> None:
    """Compare the features [R, S] that have a gradient with those that the blocks may see.

    ``window`` 0 is none. ``single``: with one layer the anchor's own slot, which looks back furthest, carries no loss.
    """
    for row, block in enumerate(chosen.tolist()):
        anchor = int(blocks.anchors[row, block])
        inside = batch.document_ids[row] == row
        start = int(inside.nonzero()[0])
        first = max(start, anchor - window + 1) if window else start
        where = seen[row].nonzero().flatten().tolist()
        late = [p for p in where if p >= anchor and bool(inside[p])]
        if late:
            raise CheckFailure(
                f"a block with its anchor at {anchor} sees the feature at {late[0]}, which does not exist when it is "
                "drafted; the context must end strictly before the anchor"
            )
        foreign = [p for p in where if not bool(inside[p])]
        if foreign:
            raise CheckFailure(
                f"a block of document {row} (tokens {start} to {int(inside.nonzero()[-1])}) sees the feature at "
                f"{foreign[0]}, "
                "which is another document's; the context must stay in the anchor's document"
            )
        early = [p for p in where if p < first]
        if early:
            raise CheckFailure(
                f"a block with its anchor at {anchor} sees the feature at {early[0]}, outside its window of {window}"
            )
        first += bool(window and single and first > start)
        if anchor > first and not (bool(seen[row, anchor - 1]) and bool(seen[row, first])):
            blind = anchor - 1 if not bool(seen[row, anchor - 1]) else first
            raise CheckFailure(
                f"a block with its anchor at {anchor} does not see the feature at {blind}, which a server gives "
                "it; the "
                "context must reach from the document's start to the token before the anchor"
            )


def _check_direction(subject: Subject, features: FeatureBatch, blocks: Blocks, chosen: Tensor) -> str:
    """Full layers see their block both ways; where every layer slides, only backwards, as servers do."""
    config = subject.run.config
    if config.block_size < 3:
        return "a block of 2 has no direction"
    before = _loss(subject, features, blocks)
    noise = blocks.noise_ids.clone()
    noise[torch.arange(DOCUMENTS), chosen, -1] = blocks.noise_ids[0, 0, 0]
    after = _loss(subject, features, dataclasses.replace(blocks, noise_ids=noise))
    looks_ahead = not torch.equal(before, after)
    if FULL in config.layer_types and not looks_ahead:
        raise CheckFailure(
            "the first slot does not see the last one: the mask inside a block is causal, but servers run full layers "
            "without a causal mask"
        )
    if FULL not in config.layer_types and looks_ahead:
        raise CheckFailure("a slot of a sliding layer sees later slots, but servers run sliding layers causally")
    return "its block seen both ways" if looks_ahead else "its block seen causally"


def packing_parity(subject: Subject) -> str:
    """Packed documents have the features and the loss that they have alone."""
    run = subject.run
    low = run.target.dtype != torch.float32
    packed = subject.packed.features[0]
    differences, start = [], 0
    for document, alone in zip(subject.documents, subject.alone, strict=True):
        part = packed[start : start + len(document.ids)]
        differences.append(_apart(part, alone.features.to(part.device), run.target.info.hidden_size))
        start += len(document.ids)
    apart = torch.cat(differences)
    worst, middle = float(apart.max()), float(apart.median())
    # In low precision rounding depends on a matmul's shape; there the typical token decides, and the leak below.
    if (not worst <= 1e-3) if not low else (not middle <= 0.1):
        raise CheckFailure(
            f"features of packed documents differ by up to {worst:.2g} from the same documents alone (median "
            f"{middle:.2g}): state "
            "or attention crosses documents; set target.packing = unpacked"
        )
    if low:
        _check_no_crossing(subject)
    loss, weight = _layout_loss(subject, [[*range(DOCUMENTS)], *([] for _ in range(DOCUMENTS - 1))])
    loss_alone, weight_alone = _layout_loss(subject, [[n] for n in range(DOCUMENTS)])
    if not abs(weight - weight_alone) <= 1e-5 * weight_alone:
        raise CheckFailure(
            f"packed documents have loss weight {weight:.6g}, alone {weight_alone:.6g}: labels or anchors cross "
            "documents"
        )
    limit = 1e-4 if run.settings.precision == torch.float32 else 2e-2
    if not abs(loss - loss_alone) <= limit * abs(loss_alone):
        raise CheckFailure(
            f"packed documents have loss {loss:.6g}, alone {loss_alone:.6g}: positions, context or labels cross "
            "documents"
        )
    return f"{run.reader.packing}: features within {worst:.1e}, loss {loss:.5g} packed and {loss_alone:.5g} alone"


def _apart(a: Tensor, b: Tensor, hidden: int) -> Tensor:
    """Return the relative difference of each token and tap."""
    a, b = (t.float().reshape(len(t), -1, hidden) for t in (a, b))
    apart: Tensor = (a - b).norm(dim=-1) / b.norm(dim=-1).clamp_min(1e-12)
    return apart.flatten().cpu()


def _check_no_crossing(subject: Subject) -> None:
    """Reverse every other document: the rest must keep (nearly) the same features, read at the same shape."""
    run = subject.run
    changed = run.reader.read(subject.batch([range(DOCUMENTS)], shuffle=(0, 2))).features[0]
    start = 0
    for number, document in enumerate(subject.documents):
        part = slice(start, start + len(document.ids))
        start += len(document.ids)
        if number % 2:
            leaked = float(_apart(changed[part], subject.packed.features[0, part], run.target.info.hidden_size).max())
            if not leaked <= 2e-2:
                raise CheckFailure(
                    f"features of document {number} change by {leaked:.2g} when other documents change; set "
                    "target.packing = unpacked"
                )


def _layout_loss(subject: Subject, layout: list[list[int]]) -> tuple[float, float]:
    """Return loss and weight of a layout of the documents, with features that do not depend on it."""
    run = subject.run
    batch = subject.batch(layout).to(run.device)
    features = torch.zeros(*batch.ids.shape, run.config.context_size, dtype=run.target.dtype, device=run.device)
    states = features.new_zeros(*batch.ids.shape, run.config.hidden_size)
    for row, members in enumerate(layout):
        at = 0
        for number in members:
            length = len(subject.documents[number].ids)
            features[row, at : at + length] = subject.alone[number].features
            states[row, at : at + length] = subject.alone[number].final
            at += length
    given = FeatureBatch(batch=batch, features=features, final_states=states)
    with torch.no_grad():
        result = subject.step(given, subject.blocks(batch))
    return float(result.loss_sum), float(result.weight_sum)


def empty_batch(subject: Subject) -> str:
    """Without a valid anchor the step gives zero, finite, and every parameter a gradient; the update skips."""
    run, model = subject.run, subject.run.draft_model
    full = rows_of(subject.packed, DOCUMENTS)
    bare = dataclasses.replace(full.batch, loss_mask=torch.zeros_like(full.batch.loss_mask))
    result = _backward(subject, dataclasses.replace(full, batch=bare))
    if float(result[0]) != 0.0 or float(result[1]) != 0.0:
        raise CheckFailure(
            f"a batch without supervised tokens has loss {float(result[0]):.6g} and weight "
            f"{float(result[1]):.6g}; both must be 0"
        )
    _check_gradients(subject, "a batch without anchors", zero=True)
    # The norms, and one matrix, which may have another optimizer: a copy of all of them would double the weights.
    matrix = min((p.numel(), name) for name, p in model.named_parameters() if p.dim() >= 2)[1]
    before = {name: p.detach().clone() for name, p in model.named_parameters() if p.dim() < 2 or name == matrix}
    updater = Updater(build_optimizer(model, run.recipe.training), clip_norm=run.recipe.training.clip_norm)
    updater.apply(step=0, factor=1.0, loss_sum=result[0], weight_sum=result[1])
    if updater.fault() is not None:
        raise CheckFailure("an update without anchors counts as not finite; it must be skipped")
    for name, old in before.items():
        if not torch.equal(model.get_parameter(name), old):
            raise CheckFailure(f"an update without anchors changed {name}; it must be skipped")
    mask = full.batch.loss_mask.clone()
    mask[1:] = False
    mixed = _backward(subject, dataclasses.replace(full, batch=dataclasses.replace(full.batch, loss_mask=mask)))
    if not (bool(torch.isfinite(mixed[0])) and float(mixed[1]) > 0):
        raise CheckFailure(
            f"rows without anchors beside a row with some give loss {float(mixed[0])} and weight {float(mixed[1])}"
        )
    _check_gradients(subject, "a row without anchors", zero=False)
    count = sum(1 for _ in model.parameters())
    return (
        f"loss 0, weight 0, {count} parameters with finite gradients, update skipped; {DOCUMENTS - 1} empty rows "
        f"of {TOKENS * DOCUMENTS} do no harm"
    )


def _backward(subject: Subject, features: FeatureBatch) -> tuple[Tensor, Tensor]:
    subject.run.draft_model.zero_grad(set_to_none=True)
    result = subject.step(features, subject.blocks(features.batch))
    if not result.loss_sum.requires_grad:
        raise CheckFailure(
            "the loss has no gradient to run backward through; with several ranks the others would wait for ever"
        )
    result.loss_sum.backward()
    return result.loss_sum.detach(), result.weight_sum


def _check_gradients(subject: Subject, what: str, *, zero: bool) -> None:
    """Raise CheckFailure for a parameter without gradient (a collective would wait for ever) or with one not finite."""
    for name, parameter in subject.run.draft_model.named_parameters():
        if parameter.grad is None:
            raise CheckFailure(
                f"{what} leaves {name} without a gradient; with several ranks the others would wait for it for ever"
            )
        if not bool(torch.isfinite(parameter.grad).all()):
            raise CheckFailure(
                f"{what} makes the gradient of {name} not finite: a query that sees nothing, or 0 times infinity"
            )
        if zero and bool((parameter.grad != 0).any()):
            raise CheckFailure(f"{what} gives {name} a gradient that is not zero")
