from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.config import TargetConfig
from slipstream.errors import TargetError
from slipstream.target.description import describe_target
from slipstream.target.model import load_target, load_tokenizer, resolve_path
from slipstream.target.source import has_bfloat16, resolve_dtype
from support.tiny import save_tiny_target, tiny_tokenizer
from unit.target.conftest import load_in


@pytest.fixture
def directory(directory_of, tmp_path) -> Path:
    """Return a copy of a tiny target that a test may damage."""
    return Path(shutil.copytree(directory_of("qwen3"), tmp_path / "target"))


def change_weights(directory: Path, change) -> None:
    weights = load_file(directory / "model.safetensors")
    change(weights)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def save_model(directory: Path, model) -> Path:
    model.save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return directory


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("", "target.path is empty"),
        ("/no/such/model", "target /no/such/model does not exist"),
        ("./no/model", "target ./no/model does not exist"),
        ("model.gguf", "target model.gguf does not exist"),
        ("owner/model.gguf", "target owner/model.gguf does not exist"),
        ("gpt2", "target gpt2 does not exist"),
    ],
)
def test_paths_that_name_nothing(path, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TargetError, match=message):
        resolve_path(path)


def test_paths_that_name_something(directory, monkeypatch, tmp_path):
    assert resolve_path(str(directory)) == directory
    monkeypatch.chdir(tmp_path)
    assert resolve_path("target") == Path("target")
    assert resolve_path("some-owner/Some-Model_1.5") == "some-owner/Some-Model_1.5"
    (tmp_path / "weights.GGUF").write_bytes(b"GGUF")
    assert resolve_path("weights.GGUF") == Path("weights.GGUF")
    with pytest.raises(TargetError, match=r"is a file but not a \.gguf file"):
        resolve_path(str(directory / "config.json"))


def test_hub_id_that_the_hub_does_not_give(monkeypatch):
    import huggingface_hub

    def refuse(*args, **kwargs):
        raise OSError("offline\nand more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(
        TargetError, match=r"neither a local directory nor a repository that the hub gives: offline and more$"
    ):
        load_in("owner/model")


def test_hub_id_is_downloaded_then_read_locally(monkeypatch, directory):
    import huggingface_hub

    asked = []

    def download(hub_id, *, revision, allow_patterns, ignore_patterns):
        asked.append((hub_id, revision, [p for p in allow_patterns if p.endswith(("safetensors", "bin"))]))
        return str(directory)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert load_in("owner/model", revision="v1").info.name == "owner/model"
    assert load_tokenizer(TargetConfig(path="owner/model")).eos_token_id == 257
    assert asked == [("owner/model", "v1", ["*.safetensors"]), ("owner/model", None, [])]


def test_a_description_downloads_no_weights(monkeypatch, directory, tmp_path):
    import huggingface_hub

    asked = []
    bare = Path(shutil.copytree(directory, tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors")))

    def download(hub_id, *, revision, allow_patterns, ignore_patterns):
        asked.extend(p for p in allow_patterns if p.endswith(("safetensors", "bin", "pt", "*")))
        return str(bare)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    info, tokenizer, parameters = describe_target(TargetConfig(path="owner/model"))
    assert asked == []
    assert (info.name, info.hidden_size, info.digest) == ("owner/model", 64, "")
    assert tokenizer.eos_token_id == 257
    assert parameters == describe_target(TargetConfig(path=str(directory)))[2]
    assert describe_target(TargetConfig(path=str(directory)))[0].digest == load_in(directory).info.digest
    with pytest.raises(TargetError, match=r"holds no \*\.safetensors"):  # a local one has them or is incomplete
        describe_target(TargetConfig(path=str(bare)))


def test_local_paths_need_no_network(directory, monkeypatch):
    import socket

    monkeypatch.setattr(socket.socket, "connect", lambda *a: pytest.fail("the network was asked for"))
    load_in(directory)


def test_missing_weights_are_an_error(directory, capsys):
    change_weights(directory, lambda w: w.pop("model.layers.3.mlp.up_proj.weight"))
    with pytest.raises(
        TargetError, match=r"lacks 1 weights that would start at random, first model\.layers\.3\.mlp\.up_proj"
    ):
        load_in(directory)


def test_missing_head_of_an_untied_target_is_an_error(directory):
    change_weights(directory, lambda w: w.pop("lm_head.weight"))
    with pytest.raises(TargetError, match=r"first lm_head\.weight"):
        load_in(directory)


def test_weights_of_another_shape_are_an_error(directory):
    change_weights(directory, lambda w: w.update({"lm_head.weight": w["lm_head.weight"][:100].clone()}))
    with pytest.raises(TargetError, match=r"another shape than config\.json says, first lm_head\.weight"):
        load_in(directory)


def test_weights_that_are_not_used_are_said(directory, capsys):
    change_weights(directory, lambda w: w.update({"model.extra.weight": torch.zeros(3)}))
    load_in(directory)
    assert "1 weights are not used, first model.extra.weight" in capsys.readouterr().err


def test_damaged_or_absent_weights_are_an_error(directory):
    (directory / "model.safetensors").write_bytes(b"not a header" * 9)
    with pytest.raises(TargetError, match="cannot be loaded as a causal language model"):
        load_in(directory)
    (directory / "model.safetensors").unlink()
    with pytest.raises(TargetError, match="cannot be loaded as a causal language model"):
        load_in(directory)


def test_no_config_and_bad_config(directory):
    (directory / "config.json").write_text("{bad", encoding="utf-8")
    with pytest.raises(TargetError, match=r"config\.json cannot be read"):
        load_in(directory)
    (directory / "config.json").unlink()
    with pytest.raises(TargetError, match=r"has no config\.json"):
        load_in(directory)


def test_missing_tokenizer(directory):
    for file in directory.glob("tokenizer*"):
        file.unlink()
    for load in (load_in, lambda d: load_tokenizer(TargetConfig(path=str(d)))):
        with pytest.raises(TargetError, match="has no tokenizer files"):
            load(directory)


def test_damaged_tokenizer(directory):
    (directory / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(TargetError, match="its tokenizer cannot be loaded"):
        load_in(directory)


def test_unknown_attention_is_an_error(directory):
    with pytest.raises(TargetError, match="bogus"):
        load_in(directory, attention="bogus")


@pytest.mark.parametrize(
    "head", ["BertForMaskedLM", "BertModel", "LlamaForSequenceClassification", "T5ForConditionalGeneration"]
)
def test_directories_that_are_not_causal_language_models(tmp_path, head):
    import transformers as tf

    small = {
        "vocab_size": 320,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    configs = {
        "Bert": lambda: tf.BertConfig(**small),
        "Llam": lambda: tf.LlamaConfig(**small, pad_token_id=0),
        "T5Fo": lambda: tf.T5Config(vocab_size=320, d_model=32, d_ff=32, num_layers=2, num_heads=2),
    }
    directory = save_model(tmp_path / "model", getattr(tf, head)(configs[head[:4]]()))
    with pytest.raises(TargetError, match=f"is a {head}, not a causal language model"):
        load_in(directory)


def test_encoder_with_a_language_model_head(tmp_path):
    import transformers as tf

    config = tf.BertConfig(
        vocab_size=320, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    with pytest.raises(TargetError):
        load_in(save_model(tmp_path / "model", tf.BertLMHeadModel(config)))


def test_multimodal_directory_gives_its_text_model(multimodal):
    model, directory = multimodal
    target = load_in(directory)
    assert target.info.is_hybrid
    assert torch.equal(target.head_weight, model.lm_head.weight)


def test_class_that_only_the_multimodal_list_knows_is_loaded_whole(multimodal, monkeypatch):
    from transformers import AutoModelForCausalLM
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5Config

    class Without:
        def __contains__(self, kind):
            return kind is not Qwen3_5Config

    monkeypatch.setattr(AutoModelForCausalLM, "_model_mapping", Without())
    target = load_in(multimodal[1])
    assert type(target.model).__name__ == "Qwen3_5ForConditionalGeneration"
    assert target.parts.decoder is target.model.model.language_model


def test_remote_code_is_not_run_unasked(directory):
    config = json.loads((directory / "config.json").read_text())
    config["model_type"] = "made_up"
    config["auto_map"] = {"AutoConfig": "code.Made", "AutoModelForCausalLM": "code.MadeModel"}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "code.py").write_text("raise SystemExit('ran')")
    with pytest.raises(TargetError, match=r"config\.json cannot be read"):
        load_in(directory)


def test_dtype_setting(monkeypatch):
    cpu = torch.device("cpu")
    assert resolve_dtype("float16", cpu) == torch.float16
    for found, expected in (
        ({"avx2": True}, torch.float32),
        ({"avx512_bf16": True}, torch.bfloat16),
        ({"amx_bf16": True}, torch.bfloat16),
    ):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda found=found: found, raising=False)
        assert resolve_dtype("auto", cpu) == expected
    for capability, expected in (((7, 5), torch.float32), ((8, 0), torch.bfloat16), ((9, 0), torch.bfloat16)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, answer=capability: answer)
        assert resolve_dtype("auto", torch.device("cuda", 0)) == expected


def test_older_torch_is_asked_by_its_probes(monkeypatch):
    cpu = torch.device("cpu")
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    for bf16, amx in ((True, False), (False, True), (False, False)):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda answer=bf16: answer, raising=False)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda answer=amx: answer, raising=False)
        assert has_bfloat16(cpu) is (bf16 or amx)
    monkeypatch.delattr(torch.cpu, "_is_avx512_bf16_supported")
    monkeypatch.delattr(torch.cpu, "_is_amx_tile_supported")
    assert not has_bfloat16(cpu)


def test_setting_decides_the_loaded_dtype(directory):
    config = TargetConfig(path=str(directory), dtype="bfloat16")
    assert load_target(config, device=torch.device("cpu")).dtype == torch.bfloat16


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_loading_is_quiet(tmp_path, family):
    """In a fresh process, so that advice given once only would be seen."""
    import subprocess
    import sys

    directory = save_tiny_target(tmp_path / "t", family)
    code = (
        "import torch; from slipstream.config import TargetConfig; from slipstream.target.model import load_target; "
        f"load_target(TargetConfig(path={str(directory)!r}), device=torch.device('cpu'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment())
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def environment() -> dict[str, str]:
    import os

    import slipstream

    return {**os.environ, "PYTHONPATH": str(Path(slipstream.__file__).parents[1])}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"hidden_size": "wide"}, "config.json cannot be read: .*hidden_size.*wide"),
        ({"vocab_size": 200}, "cannot be loaded as a causal language model"),
        ({"vocab_size": 200, "pad_token_id": None}, "another shape|its tokenizer has 262"),
        ({"rope_parameters": {"rope_type": "zzz", "rope_theta": 1e4}}, "KeyError: 'zzz'"),
        ({"rope_parameters": []}, "rope_parameters"),
    ],
)
def test_config_that_makes_no_model_is_one_line(directory, capfd, changes, message):
    """Nothing beside the error: neither a traceback nor the library's own lines."""
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **changes}))
    for load in (load_in, lambda d: describe_target(TargetConfig(path=str(d)))):
        with pytest.raises(TargetError, match=message) as caught:
            load(directory)
        assert "\n" not in str(caught.value)
        assert capfd.readouterr().err == ""


@pytest.mark.parametrize("value", ["x", {"a": 1}, ["a"], 1.5, [[1]], True])
def test_end_tokens_of_a_wrong_type(directory, value):
    path = directory / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": value}))
    for load in (load_in, lambda d: describe_target(TargetConfig(path=str(d)))):
        with pytest.raises(TargetError, match=r"generation_config\.json.*eos_token_id is .*whole number") as caught:
            load(directory)
        assert "\n" not in str(caught.value)
