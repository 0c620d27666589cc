"""From a recipe to everything that a run needs in memory: target, data, drafter, attention, and the run's identity."""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from slipstream.compilation import install, verify
from slipstream.compilation.bundle_live import load_for_run
from slipstream.compilation.fingerprint import work
from slipstream.compilation.tuning_counts import tune_for_any_count
from slipstream.config import Recipe, TrainingConfig
from slipstream.data.pack import PackedDataset, build_dataset, tokenizer_digest
from slipstream.drafter.attention import RefreshableAttention, build_attention
from slipstream.drafter.config import DrafterConfig, resolve
from slipstream.drafter.model import DraftModel
from slipstream.drafter.store import load_drafter
from slipstream.errors import DrafterError, TrainingError
from slipstream.pairs import drafter_path
from slipstream.target.features import FeatureReader
from slipstream.target.mask_token import resolve_mask_token
from slipstream.target.model import Target, TargetInfo, load_target
from slipstream.topology import RankPlan
from slipstream.training.checkpoint import ROWS_NAME, check_identity
from slipstream.training.directory import RunDirectory
from slipstream.training.feeder import Feeder
from slipstream.training.hardware import resolve_attention, resolve_device, resolve_precision
from slipstream.training.source import FeatureSource, TargetSource
from slipstream.training.step import StepSettings, resolve_step_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

# Settings that say how often something is written or looked at; the weights do not depend on them.
FREE_SETTINGS = frozenset(
    {"log_every", "evaluate_every", "evaluate_prompts", "checkpoint_every", "keep_checkpoints", "preflight"}
)
# Fields that a warm start may change: they are no part of the weights' meaning.
_FREE_SHAPE = frozenset({"block_size", "max_position_embeddings"})


def binding_settings(training: TrainingConfig) -> list[str]:
    """Return the training settings that the weights depend on: a resume must have the same."""
    unread = set() if training.optimizer == "muon" else {"muon_learning_rate", "muon_momentum"}
    unread |= set() if training.labels == "soft" else {"soft_share"}
    unread |= set() if training.short_blocks > 0 else {"short_blocks"}
    return [f.name for f in dataclasses.fields(training) if f.name not in FREE_SETTINGS | unread]


@dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """A run before its first step. ``steps``: optimizer steps, None where only time limits them.

    ``precision``: compute dtype of the drafter. ``identity``: what a resume must match, by name. ``readers``: of this
    rank's target replicas; ``reader`` and ``target`` are the first's. ``ends``: embedding and head of the target on the
    drafter's device. ``micro_batches``: those of a step that are this rank's, all where empty.
    """

    recipe: Recipe
    device: torch.device
    precision: torch.dtype
    target: Target
    dataset: PackedDataset
    reader: FeatureReader
    config: DrafterConfig
    draft_model: DraftModel
    attention: RefreshableAttention
    settings: StepSettings
    steps: int | None
    identity: dict[str, Any]
    readers: tuple[FeatureReader, ...] = ()
    own: tuple[int, ...] = ()

    @property
    def micro_batches(self) -> tuple[int, ...]:
        """This rank's micro-batches of a step, rising, of 0 .. accumulation-1."""
        return self.own or tuple(range(self.recipe.training.accumulation))

    @functools.cached_property
    def ends(self) -> Target:
        """The target's embedding and head, on the drafter's device."""
        return self.target if self.target.device == self.device else self.target.ends_on(self.device)

    def source(self) -> FeatureSource:
        """Return where this rank's features come from: threads, unless one target shares the drafter's device."""
        training, seed = self.recipe.training, self.recipe.run.seed
        if len(self.readers) < 2 and self.target.device == self.device:
            return TargetSource(self.dataset, self.reader, rows=training.rows, seed=seed)
        topology = self.recipe.topology
        return Feeder(
            self.dataset,
            self.readers or (self.reader,),
            rows=training.rows,
            seed=seed,
            device=self.device,
            micro_batches=self.micro_batches,
            accumulation=training.accumulation,
            depth=topology.queue,
            lockstep=topology.lockstep,
        )

    def on_one_device(self) -> PreparedRun:
        """Return this run as the first target's device alone would run it, all of it: what the checks look at."""
        if self.target.device == self.device:
            return dataclasses.replace(self, readers=(self.reader,), own=())
        draft_model = copy.deepcopy(self.draft_model).to(self.target.device)
        training = self.recipe.training
        kind: Any = self.attention.kind
        attention = build_attention(
            kind, self.config, training.rows, self.dataset.row_length, training.anchors,
            self.target.device, lengths=training.short_blocks > 0,
        )  # fmt: skip
        return dataclasses.replace(
            self,
            device=self.target.device,
            draft_model=draft_model,
            attention=attention,
            readers=(self.reader,),
            own=(),
        )


def resolve_steps(training: TrainingConfig, rows: int) -> int | None:
    """Return the optimizer steps: ``steps``, else ``epochs`` passes over ``rows`` rows, rounded up; None: time."""
    if training.steps > 0:
        return training.steps
    if training.epochs <= 0:
        return None
    return max(math.ceil(training.epochs * rows / (training.rows * training.accumulation)), 1)


def resolve_anchors(training: TrainingConfig, row_length: int) -> TrainingConfig:
    """Return the settings with ``anchors`` at most ``row_length``: a row has no more, and attention is sized by it."""
    return dataclasses.replace(training, anchors=min(training.anchors, row_length))


def resolve_drafter(recipe: Recipe, tokenizer: Any, info: TargetInfo, used_ids: frozenset[int]) -> DrafterConfig:
    """Find the mask token and complete the drafter's shape.

    Raises DrafterError, also for a target that names no rotary base or no longest sequence: nothing is guessed.
    """
    if not (recipe.drafter.rope_theta or info.rope_theta):
        raise DrafterError(
            f"target {info.name} names no rope_theta for the drafter to share; set drafter.rope_theta (10000 is usual)"
        )
    if not info.max_positions:
        raise DrafterError(
            f"target {info.name} names no max_position_embeddings, which servers read from the drafter; write the "
            "longest sequence that it was trained for into its config.json"
        )
    mask = resolve_mask_token(tokenizer, info.vocab_rows, recipe.drafter.mask_token_id, used_ids, eos_ids=info.eos_ids)
    return resolve(recipe.drafter, info, mask)


def build_drafter(recipe: Recipe, config: DrafterConfig, device: torch.device) -> DraftModel:
    """Return the drafter with its first weights, float32: from the seed, or from ``drafter.warm_start``.

    Raises DrafterError where the warm start has another shape, other layers or another mask token.
    """
    start = recipe.drafter.warm_start
    if start:
        draft_model, found = load_drafter(drafter_path(start), device=device, dtype=torch.float32)
        for field in dataclasses.fields(config):
            wanted, given = getattr(config, field.name), getattr(found, field.name)
            if wanted != given and field.name not in _FREE_SHAPE:
                raise DrafterError(
                    f"drafter.warm_start {start} has {field.name} = {given}, this recipe has {wanted}; "
                    f"set drafter.{field.name} to the former, or start from another drafter"
                )
        draft_model.config = config
    else:
        draft_model = DraftModel(config)
        draft_model.init_weights(recipe.drafter.init_std, torch.Generator("cpu").manual_seed(recipe.run.seed))
        draft_model.to(device)
    return draft_model.train()


def build_reader(recipe: Recipe, config: DrafterConfig, target: Target) -> FeatureReader:
    """Return the reader of what training needs: features, and with soft labels the target's final states."""
    soft = recipe.training.labels == "soft"
    return FeatureReader(target, config.target_layer_ids, recipe.target.packing, final_states=soft)


def source_identity(target: Target) -> dict[str, Any]:
    """Return the part of the identity that is known as soon as the target is loaded."""
    return {
        "target.digest": target.info.digest,
        "target.dtype": target.info.dtype,
        "tokenizer.digest": tokenizer_digest(target.tokenizer),
    }


def rows_digest(dataset: PackedDataset) -> str:
    """Return a digest of the rows themselves: other versions may render the same sources under the same key anew."""
    digest = hashlib.sha256(f"{len(dataset)} {dataset.row_length}".encode())
    for ids, mask in dataset.documents():
        digest.update(f" {len(ids)} ".encode() + ids.tobytes() + mask.tobytes())
    return digest.hexdigest()[:32]


def prepare(
    recipe: Recipe,
    *,
    say: Callable[[str], None],
    expected: tuple[Mapping[str, Any], Path] | None = None,
    place: RankPlan | None = None,
) -> PreparedRun:
    """Load and build everything; say what ``auto`` became. Nothing is written but caches.

    ``place``: the rank that this process is, with its devices; None is one process with ``run.device`` for all.

    ``expected``: the identity of the checkpoint that is resumed, and its path; the first difference is a
    CheckpointError; other libraries, threads or another device than the run's are one line of warning. Raises the
    errors of each part.
    """
    training = recipe.training
    install(allow_unknown=recipe.run.allow_unknown_versions)
    tune_for_any_count()
    if recipe.run.threads > 0:
        torch.set_num_threads(recipe.run.threads)
    device = resolve_device(recipe.run.device if place is None else place.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    precision = resolve_precision(training.precision, device)
    kind = resolve_attention(training.attention, device)
    homes = [device] if place is None else [resolve_device(replica.devices[0]) for replica in place.replicas]
    # Their first forwards wait for the bundle: they would tune the target's kernels.
    targets = [load_target(recipe.target, device=home, check_causal=False) for home in homes]
    target = targets[0]
    identity = source_identity(target)
    if expected is not None:
        saved, checkpoint = expected
        check_identity({k: v for k, v in saved.items() if k in identity}, identity, checkpoint)
    dataset = build_dataset(recipe.data, target.tokenizer, stop_ids=target.info.eos_ids)
    for line in (*dataset.notes, *dataset.report.lines()):
        say(line)
    asked = training.anchors
    training = resolve_anchors(training, dataset.row_length)
    if training.anchors < asked:
        say(f"training.anchors is {asked}, more than a row's {dataset.row_length} tokens: {training.anchors} are used")
    recipe = dataclasses.replace(recipe, training=training)
    config = resolve_drafter(recipe, target.tokenizer, target.info, dataset.used_ids)
    load_for_run(
        work(
            recipe, config, target_digest=target.info.digest, row_length=dataset.row_length, precision=precision,
            attention=kind, device=device,
        ),
        device,
        say=say,
    )  # fmt: skip
    for each in targets:
        each.assert_causal()
    readers = tuple(build_reader(recipe, config, each) for each in targets)
    reader = readers[0]
    for other in readers[1:]:
        if other.packing != reader.packing:
            raise TrainingError(
                f"the target reads documents {reader.packing} on {reader.target.device} and {other.packing} on "
                f"{other.target.device}; set target.packing to unpacked"
            )
    settings = resolve_step_settings(
        training, block_size=config.block_size, vocab_rows=config.vocab_size, precision=precision
    )
    identity |= {f"drafter.{f.name}": getattr(config, f.name) for f in dataclasses.fields(config)}
    identity |= {
        "data.key": dataset.key,
        ROWS_NAME: rows_digest(dataset),
        "run.seed": recipe.run.seed,
        "device": device.type,
    }
    identity |= {f"training.{name}": getattr(training, name) for name in binding_settings(training)}
    identity |= {
        "training.precision": str(precision).removeprefix("torch."),
        "training.attention": kind,
        "target.attention": recipe.target.attention,
        "target.packing": reader.packing,
    }
    if expected is not None:
        check_identity(expected[0], identity, expected[1])
        if changes := RunDirectory(expected[1].parents[1]).environment_changes(str(device)):
            say(
                f"warning: not as before: {', '.join(changes)}; the run goes on, but no longer repeats an "
                "uninterrupted one to the bit"
            )
    if dataset.row_length < config.block_size:
        raise TrainingError(
            f"data.row_length is {dataset.row_length}, shorter than a block of {config.block_size}; raise it"
        )
    draft_model = build_drafter(recipe, config, device)
    attention = build_attention(
        kind, config, training.rows, dataset.row_length, training.anchors, device, lengths=training.short_blocks > 0
    )
    say(
        f"device {device}, drafter computes in {identity['training.precision']} (weights and optimizer state float32), "
        f"attention {attention.kind}; target {target.info.model_type} in {target.info.dtype}, "
        f"documents {reader.packing}"
    )
    parameters = sum(p.numel() for p in draft_model.parameters())
    say(
        f"drafter: {config.layers} layers, {parameters:,} parameters, block {config.block_size}, "
        f"target layers {list(config.target_layer_ids)}, mask token {config.mask_token_id}"
    )
    verify()  # now that everything has been imported
    return PreparedRun(
        recipe=recipe,
        device=device,
        precision=precision,
        target=target,
        dataset=dataset,
        reader=reader,
        config=config,
        draft_model=draft_model,
        attention=attention,
        settings=settings,
        steps=resolve_steps(training, len(dataset)),
        identity=identity,
        readers=readers,
        own=() if place is None else place.micro_batches,
    )
