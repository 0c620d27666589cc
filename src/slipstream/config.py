"""The recipe: frozen dataclasses, read from one TOML file, changed by ``--section.key value`` on the command line.

Unknown keys are refused with the nearest name. Each field's docstring is its help text.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_type_hints

from slipstream.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Where a run lives and what makes it repeatable."""

    directory: str = "runs/drafter"
    """Run directory. An existing one is never overwritten: it is resumed with --resume, or another name is chosen."""
    seed: int = 0
    """Seed of batch order, anchors and initial weights."""
    device: str = "auto"
    """auto (cuda if there is one, else cpu), cpu, cuda or cuda:N."""
    threads: int = 0
    """CPU threads for torch; 0 leaves torch's own choice."""


@dataclass(frozen=True, kw_only=True)
class TargetConfig:
    """The frozen model that is to be accelerated."""

    path: str = ""
    """Directory, hub id or .gguf file of a causal language model that transformers loads; or `smollm2`."""
    revision: str | None = None
    """Hub revision; ignored for local paths."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Weights' dtype. auto: bfloat16 where the hardware has it, else float32."""
    attention: str = "sdpa"
    """transformers' attention implementation for the target."""
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
    template_kwargs: dict[str, str | bool | int] = field(default_factory=dict)
    """Further variables for the chat template."""
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
    """A drafter directory (z-lab layout) whose weights are the start."""


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
    """Micro-batches of an optimizer step."""
    anchors: int = 512
    """Anchors drawn per row and pass, at most; drawn anew each time."""
    draws_per_prefill: int = 1
    """Anchor draws for each pass of the target."""
    loss: Literal["decay", "dpace"] = "decay"
    """Slot weights: exp(-(k-1)/gamma), or D-PACE (confidence-weighted)."""
    gamma: float = 0.0
    """Decay of slot weights; 0: 7 at block 16, 5 at 10, 4 at 8, else block/2."""
    dpace_alpha: float = 0.5
    """D-PACE's mixing of confidence with 1."""
    learning_rate: float = 6e-4
    """Peak learning rate."""
    min_lr_ratio: float = 0.1
    """Final learning rate, as a share of the peak."""
    schedule: Literal["cosine", "wsd"] = "cosine"
    """After warm-up: cosine to the end, or stable and then a cosine decay over the last decay_ratio."""
    warmup_ratio: float = 0.04
    """Share of the steps over which the learning rate rises."""
    decay_ratio: float = 0.2
    """wsd: share of the steps that decays."""
    weight_decay: float = 0.0
    """AdamW weight decay, on matrices only."""
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
    """Steps between decoded acceptance on held-out prompts; 0 only at the end."""
    evaluate_prompts: int = 8
    """Held-out prompts of that evaluation."""
    checkpoint_every: int = 0
    """Steps between checkpoints; 0 only at the end."""
    keep_checkpoints: int = 2
    """Newest checkpoints that are kept."""
    preflight: bool = True
    """Run the cheap preflight checks before step 0."""


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


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that a run needs."""

    run: RunConfig = field(default_factory=RunConfig)
    target: TargetConfig = field(default_factory=TargetConfig)
    data: DataConfig = field(default_factory=DataConfig)
    regenerate: RegenerateConfig = field(default_factory=RegenerateConfig)
    drafter: DrafterSettings = field(default_factory=DrafterSettings)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)


def known_keys() -> list[str]:
    """Return every setting as ``section.key``."""
    hints = get_type_hints(Recipe)
    return [f"{section}.{f.name}" for section, cls in hints.items() for f in dataclasses.fields(cls)]


def _nearest(name: str, known: Sequence[str]) -> str:
    """Return `` Did you mean X?`` for the closest known name, comparing the key alone when the section is off."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if not close:
        leaf = name.rsplit(".", 1)[-1]
        close = [k for k in known if difflib.SequenceMatcher(None, leaf, k.rsplit(".", 1)[-1]).ratio() > 0.7][:1]
    return f" Did you mean {close[0]}?" if close else ""


def recipe_from_dict(tree: dict[str, Any], origin: str) -> Recipe:
    """Build a recipe from nested dicts. Raises ConfigError naming ``origin``, the key, and the nearest known one."""
    import msgspec

    known = known_keys()
    sections = sorted({k.split(".")[0] for k in known})
    for section, body in tree.items():
        if section not in sections:
            raise ConfigError(f"{origin}: unknown section [{section}].{_nearest(section, sections)}")
        if not isinstance(body, dict):
            raise ConfigError(f"{origin}: {section} is {body!r}, but it is a section: write [{section}] and keys under it")
        for key in body:
            if f"{section}.{key}" not in known:
                raise ConfigError(f"{origin}: unknown key {section}.{key}.{_nearest(f'{section}.{key}', known)}")
    try:
        return msgspec.convert(tree, Recipe)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{origin}: {str(error).replace('$.', '')}") from None


def load_recipe(path: Path | str | None, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe file (None: all defaults), apply overrides, validate. Relative paths stay as written.

    Raises ConfigError for a missing file, bad TOML, an unknown key or a value of the wrong type.
    """
    if path is None:
        recipe = Recipe()
    else:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except FileNotFoundError:
            raise ConfigError(f"recipe {path} does not exist; give the path of a .toml file") from None
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"recipe {path} cannot be read: {error}") from None
        try:
            tree = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"recipe {path} is not valid TOML: {error}") from None
        recipe = recipe_from_dict(tree, str(path))
    if overrides:
        recipe = apply_overrides(recipe, overrides)
    validate(recipe)
    return recipe


def apply_overrides(recipe: Recipe, overrides: Sequence[str]) -> Recipe:
    """Apply ``--section.key value`` arguments. Raises ConfigError with the nearest name for an unknown one."""
    import tyro

    known = known_keys()
    for token in overrides:
        if not token.startswith("--"):
            continue
        name = token[2:].split("=", 1)[0].replace("-", "_")
        plain = name.replace(".no_", ".", 1)
        if name not in known and plain not in known:
            raise ConfigError(f"unknown setting --{name}.{_nearest(name, known)}")
    stderr, stdout = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr), contextlib.redirect_stdout(stdout):
            return tyro.cli(Recipe, args=list(overrides), default=recipe)
    except SystemExit:
        lines = [line.strip(" │|╭╮╰╯─-+") for line in (stderr.getvalue() + stdout.getvalue()).splitlines()]
        lines = [line for line in lines if line and not line.endswith(("error", "options", "arguments"))]
        reason = lines[0] if lines else " ".join(overrides)
        raise ConfigError(f"bad override: {reason}") from None


def validate(recipe: Recipe) -> None:
    """Refuse values that no run can use. Raises ConfigError naming the setting, its value and the cure."""
    t, d, e = recipe.training, recipe.drafter, recipe.evaluation
    if d.block_size < 2:
        raise ConfigError(f"drafter.block_size is {d.block_size}; a block is an anchor and at least one mask: use 2 or more")
    at_least_one = {
        "drafter.layers": d.layers,
        "data.row_length": recipe.data.row_length,
        "training.rows": t.rows,
        "training.accumulation": t.accumulation,
        "training.anchors": t.anchors,
        "training.draws_per_prefill": t.draws_per_prefill,
        "training.log_every": t.log_every,
        "training.keep_checkpoints": t.keep_checkpoints,
        "evaluation.max_new_tokens": e.max_new_tokens,
        "evaluation.batch_size": e.batch_size,
        "regenerate.max_new_tokens": recipe.regenerate.max_new_tokens,
        "regenerate.batch_size": recipe.regenerate.batch_size,
    }
    for name, value in at_least_one.items():
        if value < 1:
            raise ConfigError(f"{name} is {value}; it must be at least 1")
    for name, ratio in {
        "training.min_lr_ratio": t.min_lr_ratio,
        "training.warmup_ratio": t.warmup_ratio,
        "training.decay_ratio": t.decay_ratio,
    }.items():
        if not 0 <= ratio <= 1:
            raise ConfigError(f"{name} is {ratio}; it is a share between 0 and 1")
    for name, number in {
        "training.learning_rate": t.learning_rate,
        "training.clip_norm": t.clip_norm,
        "drafter.init_std": d.init_std,
    }.items():
        if not 0 < number < float("inf"):
            raise ConfigError(f"{name} is {number}; it must be a positive number")
    for name, number in {
        "evaluation.temperature": e.temperature,
        "regenerate.temperature": recipe.regenerate.temperature,
        "training.gamma": t.gamma,
        "training.max_minutes": t.max_minutes,
        "training.weight_decay": t.weight_decay,
    }.items():
        if not 0 <= number < float("inf"):
            raise ConfigError(f"{name} is {number}; it must be 0 or more")
    if t.steps == 0 and t.epochs <= 0 and t.max_minutes == 0:
        raise ConfigError(f"training.steps is 0 and training.epochs is {t.epochs}; set one of them above 0")
    if t.steps < 0 or min(t.evaluate_every, t.checkpoint_every, recipe.data.max_samples, e.max_prompts) < 0:
        raise ConfigError("training.steps, evaluate_every, checkpoint_every, data.max_samples and evaluation.max_prompts: none may be negative")
    bad = [kind for kind in d.layer_types if kind not in ("full_attention", "sliding_attention")]
    if bad:
        raise ConfigError(f"drafter.layer_types holds {bad[0]!r}; use full_attention or sliding_attention")
    if d.layer_types and len(d.layer_types) != d.layers:
        raise ConfigError(f"drafter.layer_types has {len(d.layer_types)} entries for {d.layers} layers; give one for each")
    if "sliding_attention" in d.layer_types and d.sliding_window < 1:
        raise ConfigError(f"drafter.sliding_window is {d.sliding_window}, but a layer is sliding_attention; give the window")


def recipe_as_toml(recipe: Recipe) -> str:
    """Return the resolved recipe as TOML that ``load_recipe`` reads back equal."""
    out: list[str] = []
    for section in dataclasses.fields(Recipe):
        out.append(f"[{section.name}]")
        body = getattr(recipe, section.name)
        for f in dataclasses.fields(body):
            value = getattr(body, f.name)
            if value is not None:
                out.append(f"{f.name} = {_toml_value(value)}")
        out.append("")
    return "\n".join(out)


def _toml_value(value: Any) -> str:
    """Write one TOML value; JSON's string escapes are TOML's."""
    import json

    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_toml_value(v) for v in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {_toml_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return repr(value)


def default_gamma(block_size: int) -> float:
    """Return the decay for a block size: 7 at 16, 5 at 10, 4 at 8 (DFlash, appendix A.1), half the block otherwise."""
    return {16: 7.0, 10: 5.0, 8: 4.0}.get(block_size, block_size / 2)
