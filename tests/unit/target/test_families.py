from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM

from slipstream.errors import TargetError
from slipstream.target import families
from slipstream.target.families import locate_decoder, text_config
from support.tiny import FAMILIES, LAYERS, tiny_config


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_are_the_models_own(target_of, family):
    target = target_of(family)
    parts = target.parts
    assert parts.decoder is target.model.model
    assert parts.layers is target.model.model.layers
    assert len(parts.layers) == LAYERS
    assert parts.norm is target.model.model.norm
    assert parts.lm_head is target.model.lm_head
    assert parts.embed_tokens is target.model.get_input_embeddings()


def test_text_model_inside_the_multimodal_class(multimodal):
    model, _ = multimodal
    parts = locate_decoder(model)
    assert parts.decoder is model.model.language_model
    assert len(parts.layers) == LAYERS
    assert parts.norm is model.model.language_model.norm
    assert text_config(model.config).model_type == "qwen3_5_text"


def test_other_names_are_found_by_structure():
    from transformers import GPT2Config, GPT2LMHeadModel, GPTNeoXConfig, GPTNeoXForCausalLM

    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=16, n_layer=3, n_head=2, n_positions=32))
    parts = locate_decoder(gpt2)
    assert parts.layers is gpt2.transformer.h
    assert parts.norm is gpt2.transformer.ln_f
    neox = GPTNeoXForCausalLM(
        GPTNeoXConfig(vocab_size=32, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=16)
    )
    assert locate_decoder(neox).norm is neox.gpt_neox.final_layer_norm


def test_bare_decoder_has_no_head():
    with pytest.raises(TargetError, match="no language-model head"):
        locate_decoder(AutoModel.from_config(tiny_config("llama")))


def test_layers_that_cannot_be_found_are_an_error():
    model = AutoModelForCausalLM.from_config(tiny_config("llama"))
    model.model.layers = nn.ModuleList(list(model.model.layers)[:-1])
    with pytest.raises(TargetError, match="no module holds 8 decoder layers"):
        locate_decoder(model)


def test_missing_final_norm_is_an_error():
    model = AutoModelForCausalLM.from_config(tiny_config("llama"))
    del model.model.norm
    with pytest.raises(TargetError, match="no final norm"):
        locate_decoder(model)


def test_model_without_layers_is_an_error():
    model = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda decoder: SimpleNamespace()))
    with pytest.raises(TargetError, match="num_hidden_layers None"):
        locate_decoder(model)


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("qwen3", (False, False, False)),
        ("qwen3_5", (True, False, False)),
        ("llama", (False, False, False)),
        ("gemma3", (False, True, False)),
        ("qwen3_moe", (False, False, True)),
    ],
)
def test_kinds(family, expected):
    config = tiny_config(family)
    assert (families.is_hybrid(config), families.has_sliding(config), families.is_moe(config)) == expected


def test_sliding_without_a_list_of_layer_kinds():
    assert families.has_sliding(SimpleNamespace(sliding_window=8))
    assert not families.has_sliding(SimpleNamespace(sliding_window=None))
    assert not families.has_sliding(SimpleNamespace(sliding_window=8, use_sliding_window=False))


def test_chunked_attention_is_seen():
    assert families.has_chunks(SimpleNamespace(attention_chunk_size=8192))
    assert families.has_chunks(SimpleNamespace(layer_types=["chunked_attention", "full_attention"]))
    assert not families.has_chunks(tiny_config("llama"))


def test_rope_theta_in_each_dialect():
    assert families.rope_theta(SimpleNamespace(rope_parameters={"rope_theta": 5e5})) == 5e5
    assert families.rope_theta(SimpleNamespace(rope_theta=1e6)) == 1e6
    assert families.rope_theta(SimpleNamespace()) == 0.0  # unknown, never a guess
    kinds = {"sliding_attention": {"rope_theta": 3e4}, "linear_attention": {"rope_theta": 3e4}}
    assert families.rope_theta(SimpleNamespace(rope_parameters=kinds)) == 3e4
    kinds["sliding_attention"] = {"rope_theta": 1e4}
    assert families.rope_theta(SimpleNamespace(rope_parameters=kinds)) == 0.0
    assert families.rope_theta(tiny_config("gemma3")) == 1e6  # full layers, not the sliding layers' 1e4


@pytest.mark.parametrize("value", ["abc", -1.0, float("nan"), float("inf"), True, [1]])
def test_facts_that_are_no_numbers_are_errors(value):
    with pytest.raises(TargetError, match=r"rope_theta is .*write the base that the target was trained with"):
        families.rope_theta(SimpleNamespace(rope_theta=value))
    with pytest.raises(TargetError, match=r"max_position_embeddings is .*write the longest sequence"):
        families.max_positions(SimpleNamespace(max_position_embeddings=value))


def test_positions():
    assert families.max_positions(tiny_config("llama")) == 512
    assert families.max_positions(SimpleNamespace()) == 0
    assert families.max_positions(SimpleNamespace(max_position_embeddings=None)) == 0


def test_class_defaults_are_transformers_own():
    """A config.json without the fields gets what the model's class documents, not a guess of ours."""
    from transformers import LlamaConfig, Qwen3Config, SmolLM3Config

    assert [families.rope_theta(c()) for c in (LlamaConfig, Qwen3Config, SmolLM3Config)] == [1e4, 1e4, 2e6]
    assert families.max_positions(LlamaConfig()) == 2048


def test_embedding_of_the_scaled_family_scales(target_of):
    target = target_of("gemma3")
    ids = torch.tensor([[1, 5, 9]])
    torch.testing.assert_close(target.embed(ids), target.parts.embed_tokens.weight[ids] * 8.0)  # sqrt(64)
