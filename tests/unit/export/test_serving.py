"""The engines' rules: each way of breaking a directory is named, with the engine that it would break."""

from __future__ import annotations

import copy
import json
import shlex
from typing import Any

import pytest

from slipstream.drafter.config import DrafterConfig
from slipstream.errors import ExportError
from slipstream.export.serving import engine_notes, engine_rules, expected_shapes, serve_commands

CONFIG = DrafterConfig(
    layers=2,
    block_size=8,
    target_layer_ids=(1, 3, 5),
    mask_token_id=262,
    num_target_layers=8,
    hidden_size=64,
    intermediate_size=96,
    heads=4,
    kv_heads=2,
    head_dim=16,
    vocab_size=320,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    max_position_embeddings=512,
    layer_types=("full_attention", "full_attention"),
)


def written(**changes: Any) -> dict[str, Any]:
    tree = {**CONFIG.to_json(), "eagle_aux_hidden_state_layer_ids": [2, 4, 6]}
    nested = changes.pop("dflash_config", {})
    tree.update(changes)
    tree["dflash_config"] = {**tree["dflash_config"], **nested}
    return tree


def test_a_whole_directory_breaks_no_rule() -> None:
    assert engine_rules(written(), expected_shapes(written())) == []


def test_shapes_are_those_of_the_network() -> None:
    from slipstream.drafter.model import DraftModel

    real = {name: tuple(t.shape) for name, t in DraftModel(CONFIG).state_dict().items()}
    assert expected_shapes(written()) == real
    assert len(real) == 11 * 2 + 3


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, "architectures"),
        ({"dflash_config": {"target_layer_ids": [1, 3, 7]}}, "captures layers 0 to 6"),
        ({"dflash_config": {"target_layer_ids": [1, 3, 6], "mask_token_id": 262}}, "target_layer_ids \\+ 1"),
        ({"dflash_config": {"target_layer_ids": None}}, "target_layer_ids"),
        ({"dflash_config": {"mask_token_id": 320}}, "MASK"),
        ({"dflash_config": {"mask_token_id": None}}, "MASK"),
        ({"dflash_config": {"causal": True}}, "vLLM lets dflash_config.causal"),
        ({"num_target_layers": None}, "num_target_layers"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layer_types"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_window"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}, "target_layer_ids \\+ 1"),
        ({"max_position_embeddings": 0}, "max_position_embeddings is 0"),
        ({"max_position_embeddings": None}, "max_position_embeddings is None"),
        ({"rope_parameters": None}, "vLLM reads rope_parameters"),
        ({"draft_vocab_size": 100}, "draft_vocab_size"),
        ({"auto_map": {"AutoModel": "dflash.DFlashDraftModel"}}, "auto_map"),
    ],
)
def test_each_broken_rule_is_named(change: dict[str, Any], word: str) -> None:
    import re

    faults = engine_rules(written(**change), expected_shapes(written()))
    assert any(re.search(word, fault) for fault in faults), faults


def test_a_missing_key_is_a_fault_not_a_crash() -> None:
    for key in ("rope_theta", "hidden_size", "head_dim", "num_hidden_layers"):
        tree = written()
        del tree[key]
        assert engine_rules(tree, expected_shapes(written())), key


def test_tensors_of_another_width_or_with_a_head_are_faults() -> None:
    shapes = expected_shapes(written())
    assert any("fc.weight" in f for f in engine_rules(written(), {**shapes, "fc.weight": (64, 128)}))
    faults = engine_rules(written(), {**shapes, "lm_head.weight": (320, 64)})
    assert any("ignores unknown tensors" in f for f in faults)
    assert any("own lm_head.weight" in f for f in faults)
    prefixed = {f"model.{name}": shape for name, shape in shapes.items()}
    assert any("prefix" in f for f in engine_rules(written(), prefixed))


def test_vllm_is_told_the_drafts_and_sglang_the_block() -> None:
    commands = serve_commands(written(), target="my target", drafter="out/d")
    words = shlex.split(commands.vllm)
    assert words[:3] == ["vllm", "serve", "my target"]
    settings = json.loads(words[words.index("--speculative-config") + 1])
    assert settings == {"method": "dflash", "model": "out/d", "num_speculative_tokens": 7}
    words = shlex.split(commands.sglang)
    assert words[words.index("--speculative-num-draft-tokens") + 1] == "8"
    assert words[words.index("--speculative-draft-model-path") + 1] == "out/d"


def test_a_hybrid_target_asks_sglang_for_its_state_buffers() -> None:
    plain, hybrid = (serve_commands(written(), target="t", drafter="d", hybrid=h) for h in (False, True))
    assert "mamba" not in plain.sglang + plain.vllm + hybrid.vllm
    words = shlex.split(hybrid.sglang)
    assert words[words.index("--mamba-scheduler-strategy") + 1] == "extra_buffer"
    assert "--mamba-scheduler-strategy" in " ".join(engine_notes(written(), hybrid=True))


def test_mixed_layers_ask_vllm_for_the_runner_that_has_them() -> None:
    mixed = written(layer_types=["sliding_attention", "full_attention"], sliding_window=128)
    assert serve_commands(mixed, target="t", drafter="d").vllm.startswith("VLLM_USE_V2_MODEL_RUNNER=1 vllm serve")
    alike = written(layer_types=["sliding_attention"] * 2, sliding_window=128)
    assert serve_commands(alike, target="t", drafter="d").vllm.startswith("vllm serve")
    notes = " ".join(engine_notes(mixed))
    assert "p-j <= 127" in notes
    assert "V2" in notes
    assert "p-j" not in " ".join(engine_notes(written()))


def test_a_block_size_that_no_server_could_use_is_refused() -> None:
    for value in (None, 1, True, "8"):
        tree = copy.deepcopy(written(block_size=value))
        tree["dflash_config"]["block_size"] = value
        with pytest.raises(ExportError, match="block_size"):
            serve_commands(tree, target="t", drafter="d")
