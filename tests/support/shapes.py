"""Directories with the configuration of large public targets and no weights: what a plan reads of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.tiny import tiny_tokenizer

# The figures of their config.json files; the tokenizer is the tiny one, so that ids past its 262 are unused rows.
_FIGURES: dict[str, tuple[str, dict[str, int]]] = {
    "qwen3-8b": (
        "qwen3",
        {"vocab_size": 151936, "intermediate_size": 12288, "num_hidden_layers": 36, "max_position_embeddings": 40960},
    ),
    "llama-3.1-8b": (
        "llama",
        {"vocab_size": 128256, "intermediate_size": 14336, "num_hidden_layers": 32, "max_position_embeddings": 131072},
    ),
    "qwen3.6-27b": (
        "qwen3_5",
        {
            "vocab_size": 248320,
            "hidden_size": 5120,
            "intermediate_size": 17408,
            "num_hidden_layers": 64,
            "num_attention_heads": 24,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 262144,
        },
    ),
}


def save_shape(directory: Path, name: str) -> Path:
    """Write configuration and tokenizer of one target, and an empty weights file, to ``directory`` and return it."""
    import transformers as tf
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

    classes = {
        "qwen3": (tf.Qwen3Config, "Qwen3ForCausalLM"),
        "llama": (tf.LlamaConfig, "LlamaForCausalLM"),
        "qwen3_5": (Qwen3_5TextConfig, "Qwen3_5ForCausalLM"),
    }
    family, figures = _FIGURES[name]
    common: dict[str, Any] = {
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "eos_token_id": 257,
        "pad_token_id": 258,
        "bos_token_id": None,
        "tie_word_embeddings": False,
    }
    hybrid = {
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    }
    kind, architecture = classes[family]
    config = kind(**{**common, **(hybrid if family == "qwen3_5" else {}), **figures})
    config.architectures = [architecture]
    config.save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    (directory / "model.safetensors").touch()
    return directory
