"""A target's facts without its weights: for plans, and for all that only needs to know what ends a turn."""

from __future__ import annotations

from typing import Any

import torch

from slipstream.config import TargetConfig
from slipstream.data.reason import one_line
from slipstream.errors import TargetError
from slipstream.target.digest import directory_digest
from slipstream.target.families import is_hybrid, locate_decoder, text_config
from slipstream.target.model import TargetInfo, check_tokenizer, describe
from slipstream.target.quiet import LOAD_ERRORS, quiet_loading
from slipstream.target.source import local_directory, read_config, read_tokenizer, resolve_path


def describe_target(settings: TargetConfig) -> tuple[TargetInfo, Any, int]:
    """Return the target's facts, its tokenizer and its number of parameters, from a model on the meta device.

    Of a hub id only configuration and tokenizer are downloaded, so that its ``digest``, which needs the weights, is
    empty. Raises TargetError as ``load_target`` would before it reads weights. Thread-safe.
    """
    with quiet_loading():
        return _describe(settings)


def target_is_hybrid(settings: TargetConfig) -> bool:
    """Return whether the target has recurrent layers, by its configuration alone. Raises TargetError. Thread-safe."""
    return is_hybrid(text_config(read_config(local_directory(settings, weights=False), settings)))


def _describe(settings: TargetConfig) -> tuple[TargetInfo, Any, int]:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, GenerationConfig

    directory = local_directory(settings, weights=False)
    on_hub = isinstance(resolve_path(settings.path), str)
    config = read_config(directory, settings)
    tokenizer = read_tokenizer(directory, settings)
    loader: Any = AutoModelForCausalLM
    if type(config) not in loader._model_mapping and type(config) in AutoModelForImageTextToText._model_mapping:
        loader = AutoModelForImageTextToText
    try:
        with quiet_loading(), torch.device("meta"):
            model = loader.from_config(config, trust_remote_code=settings.trust_remote_code)
            if (directory / "generation_config.json").is_file():
                model.generation_config = GenerationConfig.from_pretrained(directory)
    except LOAD_ERRORS as error:
        raise TargetError(
            f"target {settings.path} cannot be loaded as a causal language model: {one_line(error)}"
        ) from error
    digest = "" if on_hub else directory_digest(directory)
    info = describe(model, tokenizer, locate_decoder(model), settings.path, digest)
    check_tokenizer(info, tokenizer)
    return info, tokenizer, sum(p.numel() for p in model.parameters())
