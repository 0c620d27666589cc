from __future__ import annotations

import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.config import TargetConfig
from slipstream.errors import TargetError
from slipstream.target.features import FeatureReader
from slipstream.target.model import Target, load_target, load_tokenizer
from support.tiny import FAMILIES, HIDDEN, LAYERS, VOCAB_ROWS, save_tiny_target, tiny_tokenizer
from unit.target.conftest import load_in, packed_batch


def wrap(model) -> Target:
    return Target(model, tiny_tokenizer(), name="wrapped", digest="")


def check_head(target: Target) -> None:
    """head(norm(state after the last layer)) is what the model itself says, tied or not."""
    ids, states = packed_batch().ids[:, :40], []
    handle = target.parts.layers[-1].register_forward_hook(
        lambda _m, _a, out: states.append(out[0] if isinstance(out, tuple) else out)
    )
    with torch.no_grad():
        logits = target.model(input_ids=ids, use_cache=False).logits
        handle.remove()
        mine = target.head(target.parts.norm(states[0]))
    torch.testing.assert_close(mine, logits, rtol=1e-5, atol=1e-5)
    assert torch.equal(mine.argmax(-1), logits.argmax(-1))


@pytest.mark.parametrize("family", FAMILIES)
def test_head_is_the_targets_own(target_of, family):
    check_head(target_of(family))


def test_head_inside_the_multimodal_class(multimodal):
    check_head(wrap(multimodal[0]))


@pytest.mark.parametrize("kind", ["Gemma2", "Granite", "Cohere"])
def test_head_scales_and_caps_as_the_family_does(kind):
    import transformers

    config = getattr(transformers, f"{kind}Config")(
        vocab_size=VOCAB_ROWS,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        bos_token_id=1,
        eos_token_id=257,
        pad_token_id=258,
    )
    if kind == "Gemma2":
        config.final_logit_softcapping = 0.5
    if kind == "Granite":
        config.logits_scaling = 4.0
    target = wrap(getattr(transformers, f"{kind}ForCausalLM")(config))
    assert target.info.logit_softcap == (0.5 if kind == "Gemma2" else None)
    check_head(target)


@pytest.mark.parametrize("family", FAMILIES)
def test_info(target_of, directory_of, family):
    target = target_of(family)
    info = target.info
    tied = family in ("llama", "gemma3", "qwen3_5")
    assert (info.hidden_size, info.num_layers, info.vocab_rows) == (HIDDEN, LAYERS, VOCAB_ROWS)
    assert (info.heads, info.kv_heads, info.head_dim, info.intermediate_size) == (4, 2, 16, 96)
    assert info.tied is tied
    assert (target.head_weight is target.parts.embed_tokens.weight) is tied
    assert info.is_hybrid is (family == "qwen3_5")
    assert info.is_moe is (family == "qwen3_moe")
    assert info.has_sliding is (family == "gemma3")
    assert (info.eos_ids, info.pad_id, info.dtype) == ((257,), 258, "float32")
    assert (info.max_positions, info.rms_norm_eps) == (512, 1e-6)
    assert info.name == str(directory_of(family))
    assert len(info.digest) == 64


def test_target_is_frozen_and_in_eval_mode(directory_of):
    target = load_in(directory_of("qwen3"))
    assert not target.model.training
    assert not any(p.requires_grad for p in target.model.parameters())
    assert target.device == torch.device("cpu")
    assert target.dtype == torch.float32


def test_dtype_argument_overrides_the_setting(directory_of):
    config = TargetConfig(path=str(directory_of("llama")), dtype="float32")
    assert load_target(config, device=torch.device("cpu"), dtype=torch.bfloat16).info.dtype == "bfloat16"


def test_eos_ids_are_gathered_from_all_who_name_them(target_of):
    model = load_in(target_of("llama").info.name).model
    model.generation_config.eos_token_id = [257, 260]
    model.config.eos_token_id = 261
    assert wrap(model).info.eos_ids == (257, 260, 261)
    model.config.eos_token_id = 5000  # no embedding row: a leftover default of the family
    assert wrap(model).info.eos_ids == (257, 260)


def test_head_with_a_bias_is_refused():
    from transformers import PhiConfig, PhiForCausalLM

    model = PhiForCausalLM(
        PhiConfig(
            vocab_size=VOCAB_ROWS, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
        )
    )
    with pytest.raises(TargetError, match="its head has a bias"):
        wrap(model)


def test_head_of_another_size_is_refused(directory_of):
    model = load_in(directory_of("qwen3")).model
    model.lm_head = torch.nn.Linear(HIDDEN, 100, bias=False)
    with pytest.raises(TargetError, match=r"its head's weight is \[100, 64\] but its embedding has 320 rows"):
        wrap(model)


def test_tokenizer_of_another_model_is_refused(tmp_path):
    directory = save_tiny_target(tmp_path / "t", "llama", vocab_size=200, eos_token_id=1, pad_token_id=2)
    with pytest.raises(TargetError, match="its tokenizer has 262 ids for 200 embedding rows"):
        load_in(directory)


def test_empty_tokenizer_is_refused(target_of):
    with pytest.raises(TargetError, match="its tokenizer has 0 ids"):
        Target(target_of("llama").model, empty_tokenizer(), name="empty", digest="")


def empty_tokenizer():
    return SimpleNamespace(get_vocab=dict, pad_token_id=None, eos_token_id=None)


def test_states_that_depend_on_later_tokens_are_refused(directory_of, monkeypatch):
    model = load_in(directory_of("llama")).model
    forward = model.model.layers[3].forward
    monkeypatch.setattr(
        model.model.layers[3], "forward", lambda x, *a, **k: forward(x, *a, **k) + x.mean(dim=1, keepdim=True)
    )
    with pytest.raises(TargetError, match="wrapped is not causal"):
        wrap(model)


def test_close_lets_go_of_the_weights(directory_of):
    target = load_in(directory_of("llama"))
    target.close()
    assert target.model is None


def test_tokenizer_alone(directory_of, tmp_path):
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(directory_of("qwen3") / name, tmp_path)
    tokenizer = load_tokenizer(TargetConfig(path=str(tmp_path)))
    assert tokenizer.eos_token_id == 257
    assert tokenizer("hi").input_ids == tiny_tokenizer()("hi").input_ids


@pytest.mark.parametrize(
    ("dtype", "factor", "cure"),
    [
        (torch.float16, 30000.0, "set target.dtype to bfloat16 or float32"),
        (torch.float32, float("nan"), "its weights are damaged"),
    ],
)
def test_states_that_are_not_finite_are_not_called_acausal(tmp_path, dtype, factor, cure):
    directory = save_tiny_target(tmp_path / "target", "llama")
    path = directory / "model.safetensors"
    weights = {
        k: v * factor if k.endswith(("up_proj.weight", "gate_proj.weight")) else v for k, v in load_file(path).items()
    }
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(TargetError, match=f"states are not finite in {str(dtype)[6:]}; {cure}"):
        load_in(directory, dtype)
    if dtype == torch.float16:
        assert load_in(directory, torch.bfloat16).dtype == torch.bfloat16


def test_a_float16_target_is_read_in_its_dtype(tmp_path):
    target = load_in(save_tiny_target(tmp_path / "target", "llama"), torch.float16)
    features = FeatureReader(target, (1, 3)).read(packed_batch()).features
    assert features.dtype == torch.float16
    wide = FeatureReader(load_in(tmp_path / "target"), (1, 3)).read(packed_batch()).features
    assert float((features.float() - wide).norm() / wide.norm()) < 0.02
