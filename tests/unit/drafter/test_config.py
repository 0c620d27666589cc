from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import pytest

from slipstream.config import DrafterSettings
from slipstream.drafter.config import FULL, SLIDING, DrafterConfig, resolve, spread_layer_ids
from slipstream.errors import DrafterError
from support.drafting import tiny_drafter_config


def target(**changes):
    info = {
        "hidden_size": 64,
        "num_layers": 36,
        "vocab_rows": 320,
        "heads": 8,
        "kv_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "is_moe": False,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-5,
        "max_positions": 4096,
    }
    return SimpleNamespace(**{**info, **changes})


def test_empty_settings_take_the_targets_shape():
    config = resolve(DrafterSettings(), target(), 300)
    assert config == DrafterConfig(
        layers=5,
        block_size=16,
        target_layer_ids=(1, 9, 17, 25, 33),
        mask_token_id=300,
        num_target_layers=36,
        hidden_size=64,
        intermediate_size=96,
        heads=8,
        kv_heads=2,
        head_dim=16,
        vocab_size=320,
        rms_norm_eps=1e-5,
        rope_theta=1e6,
        max_position_embeddings=4096,
        layer_types=(FULL,) * 5,
    )


def test_settings_override_the_target_and_heads_are_free_of_the_hidden_size():
    settings = DrafterSettings(
        layers=2,
        block_size=8,
        target_layer_ids=(0, 4, 34),
        heads=3,
        kv_heads=1,
        head_dim=50,
        intermediate_size=10,
        rope_theta=5.0,
        layer_types=(SLIDING, FULL),
        sliding_window=7,
    )
    config = resolve(settings, target(is_moe=True), 300)
    assert (config.heads, config.kv_heads, config.head_dim, config.intermediate_size) == (3, 1, 50, 10)
    assert (config.layers, config.block_size, config.target_layer_ids) == (2, 8, (0, 4, 34))
    assert config.rope_theta == 5.0
    assert [config.window(layer) for layer in range(2)] == [7, 0]
    assert config.context_size == 3 * 64


def test_a_mixture_of_experts_gives_a_width_of_three_hidden_sizes():
    assert resolve(DrafterSettings(), target(is_moe=True), 300).intermediate_size == 192


@pytest.mark.parametrize(
    ("layers", "count", "ids"),
    [
        (36, 5, (1, 9, 17, 25, 33)),
        (64, 5, (1, 16, 31, 46, 61)),
        (40, 5, (1, 10, 19, 28, 37)),
        (8, 5, (1, 2, 3, 4, 5)),
        (36, 1, (18,)),
        (30, 5, (1, 8, 14, 20, 27)),  # 7.5 and 20.5 round to even
    ],
)
def test_layer_ids_are_spread_as_published(layers, count, ids):
    assert spread_layer_ids(layers, count) == ids


@pytest.mark.parametrize("count", [1, 2, 3, 5, 6, 8])
def test_layer_ids_spread_from_1_to_n_minus_3(count):
    for layers in range(16, 97):
        ids = spread_layer_ids(layers, count)
        assert len(ids) == count
        assert list(ids) == sorted(set(ids))
        assert 0 <= ids[0] <= ids[-1] <= layers - 2
        if count > 1:
            assert (ids[0], ids[-1]) == (1, layers - 3)


@pytest.mark.parametrize(("layers", "count"), [(4, 5), (7, 5), (3, 2), (1, 1), (8, 0)])
def test_too_few_layers_to_spread(layers, count):
    with pytest.raises(DrafterError):
        spread_layer_ids(layers, count)


def test_a_shallow_target_needs_explicit_layer_ids():
    with pytest.raises(DrafterError, match=r"6 layers is too shallow .* set drafter\.target_layer_ids"):
        resolve(DrafterSettings(), target(num_layers=6), 300)
    assert resolve(DrafterSettings(target_layer_ids=(1, 3)), target(num_layers=6), 300).target_layer_ids == (1, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 1}, "block_size is 1"),
        ({"layers": 0, "layer_types": ()}, "layers is 0"),
        ({"target_layer_ids": ()}, "do not fit"),
        ({"target_layer_ids": (3, 1)}, r"\[3, 1\] do not fit a target of 8 layers; give rising ids from 0 to 6"),
        ({"target_layer_ids": (1, 1)}, "do not fit"),
        ({"target_layer_ids": (-1, 1)}, "do not fit"),
        ({"target_layer_ids": (1, 7)}, "do not fit"),
        ({"mask_token_id": 320}, r"mask_token_id 320 is not a row .*\(0 to 319\)"),
        ({"mask_token_id": -1}, "mask_token_id -1"),
        ({"heads": 4, "kv_heads": 3}, "heads 4 is not a multiple of kv_heads 3"),
        ({"head_dim": 15}, "head_dim is 15"),
        ({"layer_types": (FULL,)}, "each of 2 layers"),
        ({"layer_types": (FULL, "linear")}, "linear"),
        ({"layer_types": (FULL, SLIDING)}, "sliding_window is 0"),
        ({"sliding_window": 8, "layer_types": (FULL, FULL)}, "no layer is sliding_attention"),
        ({"rope_theta": 0.0}, "rope_theta 0.0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps nan"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(DrafterError, match=message) as caught:
        tiny_drafter_config(**changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("changes", [{}, {"sliding": 9}, {"attention_bias": True}])
def test_json_round_trip(changes):
    config = tiny_drafter_config(**changes)
    assert DrafterConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


def test_json_has_both_dialects_and_every_key_of_the_published_layout():
    tree = tiny_drafter_config(sliding=9).to_json("float32")
    assert tree["block_size"] == tree["dflash_config"]["block_size"] == 4
    assert tree["rope_theta"] == tree["rope_parameters"]["rope_theta"] == 10000.0
    assert tree["rope_parameters"]["rope_type"] == "default"
    assert tree["rope_scaling"] is None
    assert tree["dtype"] == tree["torch_dtype"] == "float32"
    assert tree["architectures"] == ["DFlashDraftModel"]
    assert tree["dflash_config"]["target_layer_ids"] == [1, 3]
    assert tree["layer_types"] == [SLIDING, FULL]
    assert tree["sliding_window"] == 9
    assert tree["use_sliding_window"] is True
    assert "auto_map" not in tree
    published = "model_type block_size dflash_config num_target_layers hidden_size intermediate_size num_hidden_layers"
    published += " num_attention_heads num_key_value_heads head_dim vocab_size rms_norm_eps rope_theta rope_scaling"
    published += " max_position_embeddings hidden_act attention_bias attention_dropout initializer_range"
    published += " tie_word_embeddings layer_types sliding_window use_sliding_window max_window_layers dtype use_cache"
    assert set(published.split()) <= set(tree)


def test_json_is_what_transformers_reads():
    from transformers import Qwen3Config

    config = tiny_drafter_config(sliding=9, rope_theta=1e7)
    read = Qwen3Config(**config.to_json())
    assert read.rope_parameters["rope_theta"] == 1e7
    assert read.layer_types == [SLIDING, FULL]
    assert read.sliding_window == 9
    assert read.head_dim == 16


def edited(**changes):
    """Return a good config.json with dotted keys replaced; ``...`` removes one."""
    tree = tiny_drafter_config().to_json()
    for key, value in changes.items():
        body = tree
        *path, leaf = key.split("__")
        for name in path:
            body = body[name]
        if value is ...:
            body.pop(leaf, None)
        else:
            body[leaf] = value
    return tree


@pytest.mark.parametrize(
    "changes",
    [
        {"block_size": ...},
        {"dflash_config__block_size": ...},
        {"rope_theta": ...},
        {"rope_parameters": ...},
        {"rope_parameters": ..., "rope_scaling": {"rope_type": "default"}},
        {"layer_types": ...},
        {"sliding_window": 4096},
        {"is_causal": False},
        {"dflash_config__causal": False},
        {"dflash_config__output_multiplier": 1.0},
        {"auto_map": {"AutoModel": "dflash.DFlashDraftModel"}},
    ],
)
def test_older_and_neutral_configs_are_read(changes):
    assert DrafterConfig.from_json(edited(**changes)) == tiny_drafter_config()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dflash_config__target_layer_ids": ...}, "no target_layer_ids"),
        ({"dflash_config__mask_token_id": ...}, "no mask_token_id"),
        ({"block_size": ..., "dflash_config__block_size": ...}, "no block_size"),
        ({"dflash_config": None}, "no target_layer_ids|no block_size|no mask_token_id"),
        ({"dflash_config": [1]}, "must be an object"),
        ({"block_size": 8}, "8 at the top and 4 in dflash_config"),
        ({"num_target_layers": ...}, "no num_target_layers"),
        ({"head_dim": ...}, "no head_dim"),
        ({"head_dim": "16"}, "'16'; it must be a whole number"),
        ({"dflash_config__target_layer_ids": 3}, "must be a list of whole numbers"),
        ({"dflash_config__mask_token_id": [3]}, "must be a whole number"),
        ({"rope_theta": ..., "rope_parameters": ...}, "no rope_theta"),
        ({"rope_theta": 5.0}, "different rope_theta"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4}}, "plain, 1-D"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1]}}, "plain, 1-D"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "plain, 1-D"),
        ({"partial_rotary_factor": 0.25}, "must be 1"),
        ({"is_causal": True}, "is_causal = True"),
        ({"dflash_config__causal": True}, "causal = True"),
        ({"layer_types": [SLIDING, FULL], "sliding_window": 8, "is_causal": False}, "sliding layers causally"),
        ({"layer_types": ..., "use_sliding_window": True}, "no layer_types"),
        ({"dflash_config__selector_rank": 256}, "variant of DFlash"),
        ({"dflash_config__output_multiplier": 0.5}, "output_multiplier = 0.5"),
        ({"dflash_config__sample_from_anchor": True}, "sample_from_anchor"),
        ({"dflash_config__something_new": 1}, "something_new"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"layer_types": 5}, "layer_types is 5; it must be a list"),
        ({"layer_types": FULL}, "it must be a list"),
        ({"layer_types": [5]}, "does not give"),
        ({"layer_types": [[FULL]]}, "does not give"),
        ({"rope_parameters": []}, r"rope_parameters is \[\]; it must be an object"),
        ({"rope_scaling": "x"}, "rope_scaling is 'x'; it must be an object"),
        ({"dflash_config": []}, "must be an object"),
        ({"rms_norm_eps": "small"}, "'small'; it must be a number"),
        ({"rope_theta": [1]}, r"rope_theta is \[1\]; it must be a number"),
        ({"rope_theta": float("inf"), "rope_parameters": ...}, "rope_theta is inf; it must be a number"),
        ({"layer_types": [SLIDING, SLIDING], "sliding_window": "8"}, "sliding_window is '8'"),
    ],
)
def test_nothing_is_guessed_and_other_networks_are_refused(changes, message):
    with pytest.raises(DrafterError, match=message) as caught:
        DrafterConfig.from_json(edited(**changes))
    assert "\n" not in str(caught.value)


def test_a_config_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        tiny_drafter_config().block_size = 3
