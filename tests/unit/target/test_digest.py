from __future__ import annotations

import json
import shutil

import pytest

from slipstream.errors import TargetError
from slipstream.target import digest
from slipstream.target.digest import directory_digest, file_digest
from support.tiny import save_tiny_target


def test_copy_has_the_same_digest_and_another_target_has_not(directory_of, tmp_path):
    original = directory_of("llama")
    copy = shutil.copytree(original, tmp_path / "elsewhere")
    config = json.loads((copy / "config.json").read_text())
    config |= {"_name_or_path": "x", "transformers_version": "0", "dtype": "float16"}
    (copy / "config.json").write_text(json.dumps(dict(reversed(config.items()))))
    assert directory_digest(copy) == directory_digest(original)
    assert directory_digest(save_tiny_target(tmp_path / "seed1", "llama", seed=1)) != directory_digest(original)
    (copy / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-5}))
    assert directory_digest(copy) != directory_digest(original)


def test_directory_without_weights(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(TargetError, match="holds no"):
        directory_digest(tmp_path)


def test_converted_target_is_identified_by_its_source(directory_of, tmp_path):
    copy = shutil.copytree(directory_of("llama"), tmp_path / "converted")
    (copy / digest.CONVERSION).write_text(json.dumps({"digest": "abc"}))
    assert directory_digest(copy) == "abc"


def test_large_files_are_sampled_at_both_ends_and_between(tmp_path, monkeypatch):
    monkeypatch.setattr(digest, "_WHOLE", 1000)
    monkeypatch.setattr(digest, "_SAMPLE", 10)
    content = bytes(i % 251 for i in range(5000))
    file = tmp_path / "weights"
    file.write_bytes(content)
    before = file_digest(file)
    assert file_digest(file) == before
    for place in (0, 4999, (4990 * 20) // 63):
        file.write_bytes(content[:place] + b"\xff" + content[place + 1 :])
        assert file_digest(file) != before
    file.write_bytes(content + b"x")
    assert file_digest(file) != before
