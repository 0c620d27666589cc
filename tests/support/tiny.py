"""Tiny targets of real architectures, with random weights and a small byte-level tokenizer, built offline in seconds.

Every target has hidden size 64, eight layers (four would leave no room for five taps) and 320 embedding rows: 256
bytes, the specials below, and a few rows that the tokenizer never produces (so that a mask token can be found).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FAMILIES = ("qwen3", "qwen3_5", "llama", "gemma3", "qwen3_moe")
VOCAB_ROWS = 320
HIDDEN = 64
LAYERS = 8

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# As Qwen3's: reasoning is dropped from earlier turns, and with thinking off the generation prompt holds an empty block.
THINKING = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 > ns.last %}"
    "<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def tiny_tokenizer(template: str | None = CHATML) -> Any:
    """Return a byte-level tokenizer of 256 + 6 entries; ``<|im_end|>`` (id 257) is eos, ``<|pad|>`` (258) is pad."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    specials = ["<|im_start|>", "<|im_end|>", "<|pad|>", "<think>", "</think>", "<|reserved_0|>"]
    backend.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in specials])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|pad|>")
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer


def tiny_config(family: str, **changes: Any) -> Any:
    """Return the transformers config of one tiny family. ``changes`` override its fields."""
    import transformers as tf

    common: dict[str, Any] = {
        "vocab_size": VOCAB_ROWS,
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "eos_token_id": 257,
        "pad_token_id": 258,
        "bos_token_id": None,
        "tie_word_embeddings": False,
    }
    extra: dict[str, dict[str, Any]] = {
        "qwen3": {},
        "llama": {"tie_word_embeddings": True, "attention_bias": True},
        "gemma3": {"tie_word_embeddings": True, "sliding_window": 24, "query_pre_attn_scalar": 16},
        "qwen3_moe": {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "decoder_sparse_step": 1,
        },
        "qwen3_5": {
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_conv_kernel_dim": 4,
            "tie_word_embeddings": True,
        },
    }
    classes = {
        "qwen3": tf.Qwen3Config,
        "llama": tf.LlamaConfig,
        "gemma3": tf.Gemma3TextConfig,
        "qwen3_moe": tf.Qwen3MoeConfig,
    }
    if family == "qwen3_5":
        from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

        classes["qwen3_5"] = Qwen3_5TextConfig
    return classes[family](**{**common, **extra[family], **changes})


def save_tiny_target(
    directory: Path,
    family: str = "qwen3",
    *,
    seed: int = 0,
    template: str | None = CHATML,
    scale: float = 4.0,
    **changes: Any,
) -> Path:
    """Write a tiny target (model and tokenizer) to ``directory`` and return it.

    ``scale`` multiplies the matrices, so that greedy answers vary with the prompt instead of collapsing to one token.
    """
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(family, **changes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2 and "embed" not in name and "lm_head" not in name:
                parameter.mul_(scale)
    model.generation_config.eos_token_id = 257
    model.generation_config.pad_token_id = 258
    model.float().save_pretrained(directory)
    tiny_tokenizer(template).save_pretrained(directory)
    return directory


def write_conversations(path: Path, count: int = 20, *, turns: int = 1) -> Path:
    """Write ``count`` small, different chat rows as JSON lines and return the path."""
    lines = []
    for i in range(count):
        messages = []
        for t in range(turns):
            messages.append({"role": "user", "content": f"Question {i}.{t}: what is {i} plus {t}?"})
            messages.append({"role": "assistant", "content": f"Answer {i}.{t}: it is {i + t}, I think."})
        lines.append(json.dumps({"messages": messages}))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
