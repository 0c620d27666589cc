"""The proof that a drafter directory is the drafter that was trained, and that three loaders will read it as such.

Everything is read back from the disk: the tensors' names, shapes and dtype, the configuration, the engines' rules, and
the logits on context features of the real target. The logits must be equal to the bit to those of the trained weights
rounded to the stored dtype: nothing else happens between training and serving.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from slipstream.drafter.config import DrafterConfig
from slipstream.drafter.model import DraftModel
from slipstream.drafter.store import load_drafter
from slipstream.errors import DrafterError, ExportError
from slipstream.export.serving import Shape, engine_rules, expected_shapes

if TYPE_CHECKING:
    from slipstream.target.model import Target

CONFIG, WEIGHTS = "config.json", "model.safetensors"
DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
_STORED = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
# z-lab's package, SGLang and vLLM each read some of these; a missing one is replaced by a default without a word.
REQUIRED = (
    "architectures", "model_type", "block_size", "dflash_config", "num_target_layers", "hidden_size",
    "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings",
    "hidden_act", "attention_bias", "tie_word_embeddings", "layer_types", "sliding_window", "dtype", "torch_dtype",
    "eagle_aux_hidden_state_layer_ids",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What was proven. ``rounding``: largest logit difference to the float32 weights; ``same_drafts``: share of slots
    whose argmax is the same as with the float32 weights; ``positions``: tokens of context features that were used."""

    tensors: int
    parameters: int
    dtype: str
    positions: int
    slots: int
    rounding: float
    same_drafts: float

    def as_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)


def stored_tensors(directory: Path) -> dict[str, tuple[str, Shape]]:
    """Return dtype name and shape of each stored tensor, from the file's header. Raises ExportError if unreadable."""
    try:
        with open(directory / WEIGHTS, "rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length))
    except (OSError, ValueError) as error:
        raise ExportError(f"{directory / WEIGHTS} cannot be read back: {error}; export again") from None
    header.pop("__metadata__", None)
    return {
        name: (_STORED.get(entry["dtype"], entry["dtype"]), tuple(entry["shape"])) for name, entry in header.items()
    }


def read_config(directory: Path) -> dict[str, Any]:
    """Return config.json. Raises ExportError for a missing or malformed one."""
    try:
        config = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ExportError(f"{directory / CONFIG} cannot be read back: {error}; export again") from None
    if not isinstance(config, dict):
        raise ExportError(f"{directory / CONFIG} is not a JSON object; export again")
    return config


def check_config(config: Mapping[str, Any], *, dtype: str, trained: DrafterConfig) -> None:
    """Raise ExportError unless the configuration is complete, consistent with itself and equal to what was trained."""
    absent = [key for key in REQUIRED if key not in config]
    if absent:
        raise ExportError(f"config.json lacks {', '.join(absent)}; a server would put its own default there")
    nested, rope = config["dflash_config"], config["rope_parameters"]
    if not isinstance(nested, dict) or not isinstance(rope, dict):
        raise ExportError("config.json: dflash_config and rope_parameters must be objects")
    expected: dict[str, tuple[Any, Any]] = {
        "block_size": (config["block_size"], trained.block_size),
        "dflash_config.block_size": (nested.get("block_size"), trained.block_size),
        "dflash_config.target_layer_ids": (nested.get("target_layer_ids"), list(trained.target_layer_ids)),
        "dflash_config.mask_token_id": (nested.get("mask_token_id"), trained.mask_token_id),
        "eagle_aux_hidden_state_layer_ids": (
            config["eagle_aux_hidden_state_layer_ids"],
            [i + 1 for i in trained.target_layer_ids],
        ),
        "num_target_layers": (config["num_target_layers"], trained.num_target_layers),
        "vocab_size": (config["vocab_size"], trained.vocab_size),
        "hidden_size": (config["hidden_size"], trained.hidden_size),
        "intermediate_size": (config["intermediate_size"], trained.intermediate_size),
        "num_hidden_layers": (config["num_hidden_layers"], trained.layers),
        "num_attention_heads": (config["num_attention_heads"], trained.heads),
        "num_key_value_heads": (config["num_key_value_heads"], trained.kv_heads),
        "head_dim": (config["head_dim"], trained.head_dim),
        "rms_norm_eps": (config["rms_norm_eps"], trained.rms_norm_eps),
        "layer_types": (config["layer_types"], list(trained.layer_types)),
        "sliding_window": (config["sliding_window"] or 0, trained.sliding_window),
        "rope_theta": (config["rope_theta"], trained.rope_theta),
        "rope_parameters.rope_theta": (rope.get("rope_theta"), trained.rope_theta),
        "rope_parameters.rope_type": (rope.get("rope_type"), "default"),
        "rope_scaling": (config["rope_scaling"], None),
        "max_position_embeddings": (config["max_position_embeddings"], trained.max_position_embeddings),
        "dtype": (config["dtype"], dtype),
        "torch_dtype": (config["torch_dtype"], dtype),
        "attention_bias": (config["attention_bias"], trained.attention_bias),
        "tie_word_embeddings": (config["tie_word_embeddings"], False),
    }
    for name, (written, true) in expected.items():
        if written != true:
            raise ExportError(
                f"config.json has {name} {written!r}, the trained drafter {true!r}; a server would use the former"
            )


def check_tensors(config: Mapping[str, Any], stored: Mapping[str, tuple[str, Shape]], dtype: str) -> None:
    """Raise ExportError unless the stored tensors are exactly the network's, in the right shapes and one dtype."""
    expected = expected_shapes(config)
    missing, extra = sorted(set(expected) - set(stored)), sorted(set(stored) - set(expected))
    if missing:
        raise ExportError(
            f"{WEIGHTS} lacks {missing[0]} ({len(missing)} missing); servers would leave it at random values"
        )
    if extra:
        raise ExportError(
            f"{WEIGHTS} holds {extra[0]} ({len(extra)} too many); only the network of {len(expected)} tensors "
            "belongs there, "
            "without embedding, head, rotary buffers or prefixes"
        )
    for name, shape in expected.items():
        if stored[name][1] != shape:
            raise ExportError(f"{WEIGHTS}: {name} is {stored[name][1]}, config.json implies {shape}")
        if stored[name][0] != dtype:
            raise ExportError(f"{WEIGHTS}: {name} is {stored[name][0]}, but the directory is {dtype}")


def check_target(config: Mapping[str, Any], target: Target) -> None:
    """Raise ExportError unless ids, mask token and sizes fit the target that will verify."""
    info, nested = target.info, config["dflash_config"]
    ids, mask = nested["target_layer_ids"], nested["mask_token_id"]
    if not ids or min(ids) < 0 or max(ids) > info.num_layers - 2 or sorted(set(ids)) != ids:
        raise ExportError(
            f"target_layer_ids {ids} are not increasing ids in 0..{info.num_layers - 2} of a target of "
            f"{info.num_layers} layers"
        )
    if config["num_target_layers"] != info.num_layers:
        raise ExportError(
            f"num_target_layers is {config['num_target_layers']}, the target has {info.num_layers} layers"
        )
    if config["vocab_size"] != info.vocab_rows:
        raise ExportError(
            f"vocab_size is {config['vocab_size']}, the target's embedding has {info.vocab_rows} rows; vLLM would "
            "remap ids"
        )
    if config["hidden_size"] != info.hidden_size:
        raise ExportError(f"hidden_size is {config['hidden_size']}, the target's is {info.hidden_size}")
    if not 0 <= mask < info.vocab_rows:
        raise ExportError(f"mask_token_id {mask} is outside the target's {info.vocab_rows} embedding rows")
    if mask == info.pad_id or mask in info.eos_ids:
        raise ExportError(
            f"mask_token_id {mask} is the target's {'end' if mask in info.eos_ids else 'padding'} token; train "
            "with an unused one"
        )


def check_weights(stored: Mapping[str, Tensor], state: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Raise ExportError naming the first stored tensor that is not, to the bit, the trained one in ``dtype``."""
    for name, trained in state.items():
        if not torch.equal(stored[name].cpu(), trained.detach().to(dtype).cpu()):
            raise ExportError(
                f"{WEIGHTS}: {name} differs from the trained tensor; the file is damaged or of another run"
            )


@torch.no_grad()
def draft_logits(
    draft_model: DraftModel, config: DrafterConfig, target: Target, features: Tensor, ids: Tensor
) -> Tensor:
    """Return the logits [B-1, vocabulary] of one block whose anchor is the last of ``ids`` [tokens].

    ``features`` [tokens-1, K*H] are those of all earlier tokens: what a server has when it drafts.
    """
    device = features.device
    context = torch.arange(features.shape[0], device=device)[None]
    block = torch.full((1, config.block_size), config.mask_token_id, dtype=torch.long, device=device)
    block[0, 0] = ids[-1]
    positions = features.shape[0] + torch.arange(config.block_size, device=device)[None]
    dtype = next(draft_model.parameters()).dtype
    kv = draft_model.context_kv(features[None].to(dtype), context)
    hidden = draft_model.draft(target.embed(block).to(dtype), positions, kv, context_positions=context)
    logits: Tensor = target.head(hidden[0, 1:].to(target.dtype))
    return logits


def check_logits(
    directory: Path,
    *,
    state: Mapping[str, Tensor],
    config: DrafterConfig,
    target: Target,
    dtype: torch.dtype,
    ids: Sequence[int],
) -> Proof:
    """Compare logits of the reloaded directory with the trained weights on the target's features of ``ids``.

    Raises ExportError where they differ by one bit in the stored dtype, or are not finite.
    """
    from slipstream.target.features import tap_layers

    try:
        reloaded, read = load_drafter(directory, device=target.device, dtype=dtype)
    except DrafterError as error:
        raise ExportError(f"the exported directory does not load: {error}") from None
    if read != config:
        changed = [name for name in vars(read) if getattr(read, name) != getattr(config, name)]
        raise ExportError(f"config.json reads back with another {', '.join(changed)} than was trained")
    reloaded.eval()
    tokens = torch.tensor([list(ids)], device=target.device)
    with torch.no_grad(), tap_layers(target, config.target_layer_ids) as taps:
        target.model(input_ids=tokens[:, :-1], use_cache=False)
    features = taps.features()[0]
    exported = draft_logits(reloaded, config, target, features, tokens[0])
    check_weights(reloaded.state_dict(), state, dtype)
    results = {}
    for kind in (dtype, torch.float32):
        trained = DraftModel(config).to(device=target.device, dtype=kind)
        trained.load_state_dict({name: tensor.to(kind) for name, tensor in state.items()})
        results[kind] = draft_logits(trained.eval(), config, target, features, tokens[0])
    if not bool(torch.isfinite(exported).all()):
        raise ExportError("the exported drafter's logits are not finite; evaluate the checkpoint before exporting it")
    if not torch.equal(exported, results[dtype]):
        worst = (exported.float() - results[dtype].float()).abs().max().item()
        raise ExportError(
            f"the reloaded drafter's logits differ by {worst:.3g} from the trained weights in {DTYPES[dtype]}"
        )
    full = results[torch.float32]
    return Proof(
        tensors=len(state),
        parameters=sum(t.numel() for t in state.values()),
        dtype=DTYPES[dtype],
        positions=features.shape[0],
        slots=exported.shape[0],
        rounding=(exported.float() - full.float()).abs().max().item(),
        same_drafts=(exported.argmax(-1) == full.argmax(-1)).float().mean().item(),
    )


def prove(
    directory: Path,
    *,
    state: Mapping[str, Tensor],
    config: DrafterConfig,
    target: Target,
    dtype: torch.dtype,
    ids: Sequence[int],
) -> Proof:
    """Run every part of the proof on ``directory``.

    ``state``: the trained float32 tensors; ``ids``: real tokens, two or more.
    Raises ExportError naming the first part that fails.
    """
    stored, written = stored_tensors(directory), read_config(directory)
    check_config(written, dtype=DTYPES[dtype], trained=config)
    check_tensors(written, stored, DTYPES[dtype])
    check_target(written, target)
    faults = engine_rules(written, {name: shape for name, (_, shape) in stored.items()})
    if faults:
        raise ExportError("; ".join(faults))
    strangers = sorted(p.name for p in directory.iterdir() if p.name not in (CONFIG, WEIGHTS, "README.md"))
    if strangers:
        raise ExportError(f"{directory} holds {strangers[0]}, which no loader needs; export to a directory of its own")
    return check_logits(directory, state=state, config=config, target=target, dtype=dtype, ids=ids)
