from __future__ import annotations

import errno
import json

import pytest
import safetensors.torch
import torch

from slipstream.drafter.model import DraftModel
from slipstream.drafter.store import load_drafter, parameter_shapes, read_config, save_drafter
from slipstream.errors import DrafterError
from support.drafting import normal, randomise, tiny_drafter_config


@pytest.fixture
def config():
    return tiny_drafter_config(sliding=9)


@pytest.fixture
def model(config):
    return randomise(DraftModel(config))


@pytest.fixture
def directory(tmp_path, model, config):
    return save_drafter(model, config, tmp_path / "drafter", dtype=torch.float32)


def draft(model, config):
    kv = model.context_kv(normal(1, 5, config.context_size), torch.arange(5)[None])
    noise = normal(1, 4, config.hidden_size, seed=1)
    return model.draft(noise, torch.arange(5, 9)[None], kv, context_positions=torch.arange(5)[None])


def test_what_is_saved_is_loaded(directory, model, config):
    loaded, read = load_drafter(directory)
    assert read == config == loaded.config
    assert sorted(p.name for p in directory.iterdir()) == ["config.json", "model.safetensors"]
    assert sorted(p.name for p in directory.parent.iterdir()) == ["drafter"]
    for key, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], value)
    assert torch.equal(draft(loaded, config), draft(model, config))
    assert all(p.requires_grad and p.is_leaf for p in loaded.parameters())
    draft(loaded, config).sum().backward()
    assert loaded.fc.weight.grad is not None


def test_a_state_dict_is_saved_too_and_the_cast_is_recorded(tmp_path, model, config):
    directory = save_drafter(model.state_dict(), config, tmp_path / "deep" / "er", dtype=torch.bfloat16)
    tree = json.loads((directory / "config.json").read_text())
    assert tree["dtype"] == "bfloat16"
    loaded, _ = load_drafter(directory)
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    assert torch.equal(loaded.fc.weight, model.fc.weight.bfloat16())
    wide, _ = load_drafter(directory, dtype=torch.float32)
    assert {p.dtype for p in wide.parameters()} == {torch.float32}
    assert model.fc.weight.dtype == torch.float32
    with safetensors.safe_open(directory / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert set(file.keys()) == set(parameter_shapes(config))


def test_an_existing_directory_is_replaced_only_on_purpose(directory, config):
    other = randomise(DraftModel(config), seed=8)
    with pytest.raises(DrafterError, match="exists; overwrite it on purpose"):
        save_drafter(other, config, directory, dtype=torch.float32)
    save_drafter(other, config, directory, dtype=torch.float32, overwrite=True)
    assert torch.equal(load_drafter(directory)[0].fc.weight, other.fc.weight)
    assert sorted(p.name for p in directory.parent.iterdir()) == ["drafter"]


def test_what_is_not_a_drafter_is_never_replaced(tmp_path, model, config):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter").write_text("words")
    with pytest.raises(DrafterError, match="it is not a drafter"):
        save_drafter(model, config, tmp_path / "thesis", dtype=torch.float32, overwrite=True)
    assert (tmp_path / "thesis" / "chapter").read_text() == "words"


def test_a_full_disk_changes_nothing(directory, config, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    before = load_drafter(directory)[0].fc.weight
    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(DrafterError, match="No space left on device; nothing was changed"):
        save_drafter(randomise(DraftModel(config), seed=8), config, directory, dtype=torch.float32, overwrite=True)
    assert torch.equal(load_drafter(directory)[0].fc.weight, before)
    assert sorted(p.name for p in directory.parent.iterdir()) == ["drafter"]


def test_a_state_of_another_shape_is_not_saved(tmp_path, model):
    deeper = tiny_drafter_config(layers=3, layer_types=("full_attention",) * 3)
    with pytest.raises(DrafterError, match=r"lacks layers\.2"):
        save_drafter(model, deeper, tmp_path / "drafter", dtype=torch.float32)
    with pytest.raises(DrafterError, match=r"gate_proj\.weight is \(48, 32\), but the config says \(49, 32\)"):
        save_drafter(model, tiny_drafter_config(intermediate_size=49), tmp_path / "drafter", dtype=torch.float32)
    assert not list(tmp_path.iterdir())


def rewrite(directory, change):
    state = safetensors.torch.load_file(directory / "model.safetensors")
    change(state)
    safetensors.torch.save_file(state, directory / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("fc.weight"), "lacks fc.weight"),
        (lambda s: s.update({"lm_head.weight": torch.zeros(2)}), "holds lm_head.weight"),
        (lambda s: s.update({"fc.weight": torch.zeros(2, 2)}), r"fc\.weight is \(2, 2\)"),
    ],
)
def test_weights_must_be_exactly_the_configs(directory, change, message):
    rewrite(directory, change)
    with pytest.raises(DrafterError, match=message):
        load_drafter(directory)


def test_what_is_missing_or_damaged_is_named(directory, tmp_path):
    with pytest.raises(DrafterError, match=r"nowhere/config\.json does not exist"):
        load_drafter(tmp_path / "nowhere")
    weights = (directory / "model.safetensors").read_bytes()
    (directory / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(DrafterError, match="cannot be read"):
        load_drafter(directory)
    (directory / "model.safetensors").unlink()
    with pytest.raises(DrafterError, match=r"has no model\.safetensors"):
        load_drafter(directory)
    for text, message in (("{", "cannot be read"), ("[]", "not a JSON object"), ("{}", r"config\.json: config has no")):
        (directory / "config.json").write_text(text)
        with pytest.raises(DrafterError, match=message):
            read_config(directory)


def test_weights_in_several_files_are_read_through_their_index(directory, model):
    state = safetensors.torch.load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    keys = sorted(state)
    files = {"one.safetensors": keys[::2], "two.safetensors": keys[1::2]}
    for name, part in files.items():
        safetensors.torch.save_file({key: state[key] for key in part}, directory / name)
    index = {"weight_map": {key: name for name, part in files.items() for key in part}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(load_drafter(directory)[0].norm.weight, model.norm.weight)
    (directory / "two.safetensors").unlink()
    with pytest.raises(DrafterError, match=r"has no .*safetensors"):
        load_drafter(directory)
