"""The recipe's dataclasses: frozen, keyword-only, with every default. Each field's docstring is its help text.

``slipstream.recipe`` reads them from TOML and the command line.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Where a run lives and what makes it repeatable."""

    directory: str = "runs/drafter"
    """Run directory. An existing one is never overwritten: it is resumed with --resume, or another name is chosen."""
    seed: int = 0
    """Seed of batch order, anchors and initial weights."""
    device: str = "auto"
    """auto (cuda if there is one, else cpu; of several GPUs [topology] tells), cpu, cuda or cuda:N: it alone."""
    threads: int = 0
    """CPU threads for torch; 0 leaves torch's own choice. Beside a busy process give only the cores that it leaves."""
    strict: bool = True
    """A shape that is compiled after the first step is an error; false: it is counted and logged."""
    allow_unknown_versions: bool = False
    """Run although compilation under threads could not be made safe for this version of torch, Triton or FLA."""


@dataclass(frozen=True, kw_only=True)
class TargetConfig:
    """The frozen model that is to be accelerated."""

    path: str = ""
    """Directory, hub id or .gguf file of a causal language model that transformers loads; or `embedded` or
    `smollm2`, the targets of the pairs that come with the package."""
    revision: str | None = None
    """Hub revision; ignored for local paths."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Weights' dtype. auto: bfloat16 where the hardware has it, else float32."""
    attention: str = "sdpa"
    """transformers' attention implementation for the target: sdpa, eager, flash_attention_2 and others."""
    packing: Literal["auto", "packed", "unpacked"] = "auto"
    """packed rows in one pass, or each document alone. auto: packed if a probe shows the features to be equal."""
    trust_remote_code: bool = False
    """Run the modelling code that comes with the target. Only for sources you trust."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Conversations, their rendering and their packing into rows."""

    train: tuple[str, ...] = ()
    """Files (.jsonl, .jsonl.gz, .parquet), Hugging Face dataset directories or ids (`id:split` picks a split)."""
    heldout: tuple[str, ...] = ()
    """Same formats; prompts that are decoded to measure acceptance. Never trained on."""
    row_length: int = 2048
    """Tokens in a packed row."""
    over_long: Literal["truncate", "drop"] = "truncate"
    """What happens to a sample longer than a row. Counted and printed either way."""
    history: Literal["fan_out", "error"] = "fan_out"
    """When the template rewrites earlier turns: one sample per assistant turn, or an error."""
    last_turn_only: bool = False
    """Supervise only the last assistant turn of a conversation."""
    thinking: Literal["auto", "on", "off"] = "auto"
    """Value of the template's `enable_thinking`, where it has one. auto: on for turns with reasoning, else off."""
    prompt_completion: Literal["chat", "raw"] = "chat"
    """Rows with prompt and completion strings: one user and one assistant turn, or plain text without a template."""
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further variables for the chat template: strings, numbers, true or false, lists, tables. A table in the recipe;
    on the command line --data.template_kwargs.NAME VALUE for one, --data.template_kwargs JSON in place of all."""
    max_samples: int = 0
    """Read at most so many samples; 0 is all."""


@dataclass(frozen=True, kw_only=True)
class RegenerateConfig:
    """`slipstream prepare --regenerate`: the target answers the prompts itself."""

    max_new_tokens: int = 512
    """Longest answer, in tokens."""
    temperature: float = 0.0
    """0 is greedy."""
    batch_size: int = 16
    """Prompts generated at once."""
    keep_unfinished: bool = True
    """Keep answers that were cut at max_new_tokens (they are counted and printed)."""


@dataclass(frozen=True, kw_only=True)
class DrafterSettings:
    """Shape of the drafter. Zeros and empty values are derived from the target."""

    layers: int = 5
    """Decoder layers of the drafter."""
    block_size: int = 16
    """Anchor and masks drafted in one pass; B is B-1 speculative tokens."""
    target_layer_ids: tuple[int, ...] = ()
    """0-based target layers whose output is read. Empty: five, evenly spread from layer 1 to N-3."""
    mask_token_id: int = -1
    """A real, unused row of the target's embedding. -1: found (first id past the tokenizer, else a reserved token)."""
    heads: int = 0
    """Query heads; 0 takes the target's."""
    kv_heads: int = 0
    """Key and value heads; 0 takes the target's."""
    head_dim: int = 0
    """Size of one head; 0 takes the target's."""
    intermediate_size: int = 0
    """MLP width; 0 takes the target's (3 x hidden for a mixture of experts)."""
    rope_theta: float = 0.0
    """Rotary base; 0 takes the target's. Always plain, 1-D and over the full head."""
    layer_types: tuple[str, ...] = ()
    """Per layer full_attention or sliding_attention; empty is full everywhere."""
    sliding_window: int = 0
    """Window W of sliding layers: a query at p sees context j with p-j <= W-1, and its block causally."""
    init_std: float = 0.02
    """Standard deviation of initial linear weights; norms start at 1."""
    warm_start: str | None = None
    """A drafter directory (z-lab layout) whose weights are the start; or `embedded` or `smollm2`, the drafters that
    come with the package."""


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """The optimisation."""

    epochs: float = 6.0
    """Passes over the rows; used when steps is 0."""
    steps: int = 0
    """Optimizer steps; 0 derives them from epochs."""
    max_minutes: float = 0.0
    """Stop after so many minutes of training and fit the schedule to them; 0 is no limit. Not exactly repeatable."""
    rows: int = 1
    """Rows of a micro-batch."""
    accumulation: int = 1
    """Micro-batches of an optimizer step, over all ranks together; each rank needs one or more."""
    anchors: int = 512
    """Anchors drawn per row and pass, at most; drawn anew each time."""
    draws_per_prefill: int = 1
    """Anchor draws for each pass of the target."""
    short_blocks: float = 0.0
    """Share of the blocks that are cut to a drawn length, from 2 to a block less 1: for decoding in shorter ones."""
    loss: Literal["decay", "dpace"] = "decay"
    """Slot weights: exp(-(k-1)/gamma), or D-PACE (confidence-weighted)."""
    gamma: float = 0.0
    """Decay of slot weights; 0: 7 at block 16, 5 at 10, 4 at 8, else block/2."""
    dpace_alpha: float = 0.5
    """D-PACE's mixing of confidence with 1."""
    labels: Literal["hard", "soft"] = "hard"
    """hard: a slot is to give the data's token. soft: it is to give the target's own distribution over tokens there."""
    soft_share: float = 1.0
    """soft: the distribution's share in a label; the rest is the data's token."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """adamw, or muon: orthogonalised momentum (Muon) for the matrices, AdamW for the norms."""
    learning_rate: float = 6e-4
    """Peak learning rate; with muon that of the norms alone."""
    muon_learning_rate: float = 0.02
    """muon: peak learning rate of the matrices, times sqrt(rows / columns) where one has more rows than columns."""
    muon_momentum: float = 0.95
    """muon: momentum (Nesterov's)."""
    min_lr_ratio: float = 0.1
    """Final learning rate, as a share of the peak."""
    schedule: Literal["cosine", "wsd"] = "cosine"
    """After warm-up: cosine to the end, or stable and then a cosine decay over the last decay_ratio."""
    warmup_ratio: float = 0.04
    """Share of the steps over which the learning rate rises."""
    decay_ratio: float = 0.2
    """wsd: share of the steps that decays."""
    weight_decay: float = 0.0
    """Weight decay, on matrices only: a step takes this share, times their learning rate, off each."""
    beta1: float = 0.9
    """AdamW beta1."""
    beta2: float = 0.95
    """AdamW beta2."""
    clip_norm: float = 1.0
    """Gradient norm limit."""
    precision: Literal["auto", "bfloat16", "float32"] = "auto"
    """Compute dtype of the drafter's matmuls; weights and optimizer state are float32 always."""
    attention: Literal["auto", "flex", "dense"] = "auto"
    """flex: compiled block-sparse (GPU). dense: exact reference with a full mask (CPU)."""
    head_chunk: int = 0
    """Rows of logits that exist at once; 0 picks a size of about 256 MiB."""
    log_every: int = 10
    """Steps between lines of metrics.jsonl."""
    evaluate_every: int = 0
    """Steps between decoded acceptance on held-out prompts; 0 only at the end. Without data.heldout never."""
    evaluate_prompts: int = 8
    """Held-out prompts of that evaluation."""
    checkpoint_every: int = 0
    """Steps between checkpoints; 0 sets no interval. Whatever it is, one is written at the end, before every
    evaluation of evaluate_every, and when an interrupt (Ctrl-C, SIGTERM) stops the run."""
    keep_checkpoints: int = 2
    """Newest checkpoints that are kept."""
    preflight: bool = True
    """Run the cheap preflight checks before step 0."""


@dataclass(frozen=True, kw_only=True)
class TopologyConfig:
    """Which devices of a machine run the target and which train the drafter; every machine has the same."""

    targets: tuple[str, ...] = ()
    """One target replica each: cuda:N; cuda:0+cuda:1 is one replica spread over both; or cpu. Empty: chosen."""
    drafters: tuple[str, ...] = ()
    """One rank each: cuda:N, also one that a target is on; or cpu, any number of times. Empty: chosen."""
    queue: int = 2
    """Batches of features that may wait between a target replica and its drafter."""
    lockstep: bool = False
    """The target forwards of a rank run one after another: slower, for debugging."""


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Decoding that measures acceptance."""

    max_prompts: int = 0
    """Held-out prompts to decode; 0 is all."""
    max_new_tokens: int = 256
    """Longest response, in tokens."""
    temperature: float = 0.0
    """0 is greedy; above it the target samples and drafts stay greedy (exact in distribution)."""
    batch_size: int = 8
    """Prompts decoded at once."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Target's dtype for decoding. auto: the target's own setting on a GPU, float32 on a CPU (exactly lossless)."""
    block_size: int = 0
    """Block that evaluate decodes with, 2 to the trained size; 0: the trained one. While training it is that."""
    draft_whole_block: bool = False
    """Fill every slot that the drafter was trained with and verify the first; off: only those, as servers."""
    compare_block_sizes: tuple[int, ...] = ()
    """Block sizes that evaluate tries first, on held-out prompts of their own; it then decodes with the fastest."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that a run needs."""

    run: RunConfig = field(default_factory=RunConfig)
    target: TargetConfig = field(default_factory=TargetConfig)
    data: DataConfig = field(default_factory=DataConfig)
    regenerate: RegenerateConfig = field(default_factory=RegenerateConfig)
    drafter: DrafterSettings = field(default_factory=DrafterSettings)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    topology: TopologyConfig = field(default_factory=TopologyConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)


def default_gamma(block_size: int) -> float:
    """Return the decay for a block size: 7 at 16, 5 at 10, 4 at 8 (DFlash, appendix A.1), half the block otherwise."""
    return {16: 7.0, 10: 5.0, 8: 4.0}.get(block_size, block_size / 2)
