"""What the checks look at: a run's own parts, on a slice of its own data that is small enough for every start.

The slice is four short documents in one row. Two end with supervised tokens and two begin with them, so that anything
that crosses a border between documents crosses into supervised text. The drafter is the run's; it is left as it was.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from slipstream.data.pack import PackedDataset
from slipstream.drafter.anchors import Blocks, sample_blocks
from slipstream.drafter.attention import build_attention
from slipstream.preflight.report import CheckFailure
from slipstream.records import PADDING_DOCUMENT, FeatureBatch, PackedBatch, StepResult
from slipstream.target.features import Taps, tap_layers
from slipstream.training.session import PreparedRun
from slipstream.training.step import training_step

if TYPE_CHECKING:
    from slipstream.drafter.attention import RefreshableAttention
    from slipstream.drafter.config import DrafterConfig
    from slipstream.drafter.model import DraftModel

DOCUMENTS = 4
TOKENS = 48  # of a document
SUPERVISED = 4  # tokens of a document, so that three of them are anchors
ANCHORS = DOCUMENTS * (SUPERVISED - 1)


@dataclass(frozen=True)
class Document:
    """Ids and loss mask of one document of the slice, 1-D."""

    ids: tuple[int, ...]
    mask: tuple[bool, ...]


@dataclass(frozen=True)
class Alone:
    """What the target computes for one document alone, in one full forward.

    argmax int64 [T]: its own next tokens; from_last, from_weight int64 [T]: those of head(norm(last layer's state)),
    by the head module and by ``head_weight``; features and hidden [T, K*H]: by hooks, and from the model's
    ``hidden_states`` at id + 1 (None where it returns none); first_input [T, H]: what its first layer was given;
    final [T, H]: what its norm gave; logits [T, V]: what the model returned, None unless labels are soft.
    """

    argmax: Tensor
    from_last: Tensor
    from_weight: Tensor
    features: Tensor
    hidden: Tensor | None
    first_input: Tensor
    final: Tensor
    logits: Tensor | None


class Subject:
    """A prepared run and what is derived from it, each thing once. Not thread-safe."""

    def __init__(self, run: PreparedRun) -> None:
        self.run = run
        self.shared: dict[str, Any] = {}

    @cached_property
    def documents(self) -> list[Document]:
        """Four short documents of the run's data. Raises CheckFailure where no document has an anchor."""
        found: list[tuple[np.ndarray, np.ndarray, int]] = []
        for ids, mask in self.run.dataset.documents():
            starts = np.flatnonzero(mask[:-1] & mask[1:])
            if len(starts):
                found.append((ids, mask, int(starts[0])))
            if len(found) == DOCUMENTS:
                break
        if not found:
            raise CheckFailure("no document has two supervised tokens in a row; give data with answers")
        documents = []
        for number in range(DOCUMENTS):
            ids, mask, first = found[number % len(found)]
            begin = first if number % 2 else max(first - (TOKENS - SUPERVISED), 0)
            end = begin + TOKENS if number % 2 else first + SUPERVISED
            kept = mask[begin:end].copy()
            kept[first - begin + SUPERVISED :] = False
            documents.append(Document(tuple(ids[begin:end].tolist()), tuple(kept.tolist())))
        return documents

    def batch(self, layout: Sequence[Sequence[int]], *, shuffle: Sequence[int] = (), tokens: int = 0) -> PackedBatch:
        """Return a CPU batch whose row r holds the slice's documents ``layout[r]``; those in ``shuffle`` reversed."""
        width = tokens or DOCUMENTS * TOKENS
        shape = (len(layout), width)
        ids, mask = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.bool)
        numbers, positions = torch.full(shape, PADDING_DOCUMENT), torch.zeros(shape, dtype=torch.long)
        for row, members in enumerate(layout):
            at = 0
            for place, number in enumerate(members):
                document = self.documents[number]
                span = (row, slice(at, at + len(document.ids)))
                ids[span] = torch.tensor(document.ids[::-1] if number in shuffle else document.ids)
                mask[span] = torch.tensor(document.mask)
                numbers[span] = place
                positions[span] = torch.arange(len(document.ids))
                at += len(document.ids)
        return PackedBatch(index=0, ids=ids, loss_mask=mask, document_ids=numbers, positions=positions)

    @cached_property
    def packed(self) -> FeatureBatch:
        """All four documents in row 0, as the run's own reader reads them."""
        return self.run.reader.read(self.batch([range(DOCUMENTS)]))

    @cached_property
    def alone(self) -> list[Alone]:
        """Each document alone, in one full forward of the target: the reference of several checks."""
        return [_alone(self.run, document) for document in self.documents]

    @cached_property
    def attention(self) -> RefreshableAttention:
        """The run's kind of attention, for DOCUMENTS rows of the slice."""
        run = self.run
        kind: Any = run.attention.kind
        return build_attention(kind, run.config, DOCUMENTS, DOCUMENTS * TOKENS, ANCHORS, run.device)

    def blocks(self, batch: PackedBatch) -> Blocks:
        """Draw blocks as training does; there are as many as there are anchors, so that every anchor is drawn."""
        return sample_blocks(
            batch,
            anchors=ANCHORS,
            block_size=self.run.config.block_size,
            mask_token_id=self.run.config.mask_token_id,
            generator=torch.Generator("cpu").manual_seed(0),
        )

    def step(self, features: FeatureBatch, blocks: Blocks) -> StepResult:
        """Run the real training step with the run's drafter on DOCUMENTS rows."""
        run = self.run
        self.attention.update(blocks.anchors, blocks.document_start, blocks.keep)
        return training_step(
            run.draft_model,
            run.target.embed,
            run.target.head_weight,
            features,
            blocks,
            self.attention,
            settings=run.settings,
            head=run.target.head,
        )

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """Leave gradients, mode and random generators as they were."""
        model = self.run.draft_model
        training = model.training
        devices = [self.run.device] if self.run.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            try:
                yield
            finally:
                model.zero_grad(set_to_none=True)
                model.train(training)


def rows_of(features: FeatureBatch, rows: int) -> FeatureBatch:
    """Return row 0 repeated."""
    batch = features.batch
    names = ("ids", "loss_mask", "document_ids", "positions")
    repeated = {name: getattr(batch, name)[:1].repeat(rows, 1) for name in names}
    states = features.final_states
    return FeatureBatch(
        batch=PackedBatch(index=batch.index, **repeated),
        features=features.features[:1].repeat(rows, 1, 1),
        final_states=None if states is None else states[:1].repeat(rows, 1, 1),
    )


@torch.no_grad()
def _alone(run: PreparedRun, document: Document) -> Alone:
    target, ids = run.target, torch.tensor([document.ids], device=run.target.device)
    inputs: list[Tensor] = []

    def first(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs.append(args[0] if args else kwargs["hidden_states"])

    handle = target.parts.layers[0].register_forward_pre_hook(first, with_kwargs=True)
    layer_ids = run.config.target_layer_ids
    # The last layer is never a tap of a drafter, but its state is what the head reads.
    last = Taps(target, [target.info.num_layers - 1])
    try:
        with tap_layers(target, layer_ids) as taps, last:
            out = target.model(input_ids=ids, use_cache=False, output_hidden_states=True)
    finally:
        handle.remove()
    states = getattr(out, "hidden_states", None)
    hidden = None
    if states is not None and len(states) == target.info.num_layers + 1:
        hidden = torch.cat([states[i + 1] for i in layer_ids], dim=-1)[0]
    normed = target.parts.norm(last.features())
    return Alone(
        argmax=out.logits[0].argmax(-1),
        from_last=target.head(normed)[0].argmax(-1),
        from_weight=(normed[0].to(target.head_weight.dtype) @ target.head_weight.T).argmax(-1),
        features=taps.features()[0],
        hidden=hidden,
        first_input=inputs[0][0],
        final=normed[0],
        logits=out.logits[0] if run.settings.soft_share else None,
    )


def reduced_config(config: DrafterConfig, layers: int = 2) -> DrafterConfig:
    """Return the run's drafter with at most ``layers`` layers, one of each kind that it has; all else is the same."""
    kinds = config.layer_types
    mixed = len(set(kinds)) > 1
    types = (kinds[0], next(k for k in kinds if k != kinds[0])) if mixed else kinds[:layers]
    window = config.sliding_window if "sliding_attention" in types else 0
    return dataclasses.replace(config, layers=len(types), layer_types=types, sliding_window=window)


def reduced_run(
    run: PreparedRun, documents: Sequence[Document], *, row_length: int, one_each: bool = False, **training: Any
) -> PreparedRun:
    """Return a small run of the same recipe: a real data set of ``documents``, a fresh reduced drafter, its attention.

    Rows are filled in order, or hold one document each. ``training`` overrides training settings. The target, its
    reader and all code are the run's.
    """
    starts = np.cumsum([0, *(len(d.ids) for d in documents)])
    ends: list[int] = [0]
    used = 0
    for number, document in enumerate(documents):
        if number and (one_each or used + len(document.ids) > row_length):
            ends.append(number)
            used = 0
        used += len(document.ids)
    ends.append(len(documents))
    ids = np.concatenate([np.asarray(d.ids, dtype=np.int32) for d in documents])
    arrays = {
        "ids": ids,
        "loss_mask": np.concatenate([np.asarray(d.mask, dtype=np.bool_) for d in documents]),
        "starts": starts.astype(np.int64),
        "rows": np.asarray(ends, dtype=np.int64),
        "used_ids": np.unique(ids),
    }
    report = dataclasses.replace(run.dataset.report, row_length=row_length, rows=len(ends) - 1)
    settings = dataclasses.replace(run.recipe.training, **training)
    recipe = dataclasses.replace(run.recipe, training=settings)
    config = reduced_config(run.config)
    kind: Any = run.attention.kind
    attention = build_attention(
        kind, config, settings.rows, row_length, settings.anchors, run.device, lengths=settings.short_blocks > 0
    )
    return dataclasses.replace(
        run,
        recipe=recipe,
        dataset=PackedDataset(arrays, report=report, key=run.dataset.key),
        config=config,
        draft_model=fresh_drafter(run, config),
        attention=attention,
        steps=settings.steps,
    )


def fresh_drafter(run: PreparedRun, config: DrafterConfig, seed: int | None = None) -> DraftModel:
    """Return a new float32 drafter on the run's device, made as the trainer makes one; ``seed`` None is the run's."""
    from slipstream.training.session import build_drafter

    settings = dataclasses.replace(run.recipe.drafter, warm_start=None)
    settled = run.recipe.run if seed is None else dataclasses.replace(run.recipe.run, seed=seed)
    recipe = dataclasses.replace(run.recipe, drafter=settings, run=settled)
    return build_drafter(recipe, config, run.device)
