"""Cache files: whole or not there, whatever happens to the bytes, the disk or the processes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from slipstream.data import cache
from slipstream.data.cache import DamagedCache, build_lock, read_arrays, write_arrays
from slipstream.errors import DataError

ARRAYS = {
    "mask": np.array([True, False, True]),
    "ids": np.arange(7, dtype=np.int32),
    "starts": np.arange(6, dtype=np.int64).reshape(2, 3),
    "none": np.zeros(0, np.int32),
}


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "a.safetensors"
    write_arrays(path, ARRAYS, {"rows": 3})
    arrays, note = read_arrays(path)
    assert note == {"rows": 3}
    assert set(arrays) == set(ARRAYS)
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(arrays[name], array)
        assert arrays[name].dtype == array.dtype
        assert not (arrays[name].size and arrays[name].flags.writeable)
    assert [p.name for p in path.parent.iterdir()] == ["a.safetensors"]
    write_arrays(tmp_path / "b", ARRAYS, {"rows": 3})
    assert (tmp_path / "b").read_bytes() == path.read_bytes()


def test_any_tool_can_open_it(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    write_arrays(tmp_path / "a.safetensors", ARRAYS, {})
    np.testing.assert_array_equal(load_file(tmp_path / "a.safetensors")["ids"], ARRAYS["ids"])


def test_damaged_bytes_and_cuts_are_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_arrays(path, ARRAYS, {"rows": 3})
    good = path.read_bytes()
    for at in range(0, len(good), 3):
        path.write_bytes(good[:at] + bytes([good[at] ^ 0x15]) + good[at + 1 :])
        try:
            arrays, note = read_arrays(path)
        except DamagedCache:
            continue
        # Changes that survive may only concern white space and the like, never content.
        assert note == {"rows": 3}
        assert all(np.array_equal(arrays[n], a) and arrays[n].dtype == a.dtype for n, a in ARRAYS.items()), at
    for length in range(0, len(good), 7):
        path.write_bytes(good[:length])
        with pytest.raises(DamagedCache):
            read_arrays(path)


def test_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_arrays(tmp_path / "gone")


def test_a_file_of_other_code_is_as_good_as_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    write_arrays(path, ARRAYS, {"rows": 3})
    monkeypatch.setattr(cache, "code_digest", lambda: "other")
    with pytest.raises(FileNotFoundError, match="was made by other code"):
        read_arrays(path)
    write_arrays(path, ARRAYS, {"rows": 4})
    assert read_arrays(path)[1] == {"rows": 4}


def test_the_code_is_what_makes_rows_and_the_versions_that_render(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.metadata

    sources = {p.name for p in cache.row_sources()}
    assert {"render.py", "template.py", "rows.py", "fit.py", "pack.py", "conversations.py", "records.py"} <= sources
    assert all(p.is_file() for p in cache.row_sources())
    before = cache.code_digest()
    assert cache.code_digest() == before
    for name in ("transformers", "tokenizers", "jinja2"):
        with monkeypatch.context() as patch:
            real = importlib.metadata.version
            patch.setattr(importlib.metadata, "version", lambda n, name=name, real=real: "9" if n == name else real(n))
            cache.code_digest.cache_clear()
            assert cache.code_digest() != before
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", lambda self: b"changed" if self.name == "render.py" else b"same")
        cache.code_digest.cache_clear()
        changed = cache.code_digest()
        patch.setattr(Path, "read_bytes", lambda self: b"same")
        cache.code_digest.cache_clear()
        assert cache.code_digest() != changed
    cache.code_digest.cache_clear()
    assert cache.code_digest() == before


def test_rows_are_built_again_when_their_code_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from slipstream.config import DataConfig
    from slipstream.data.pack import build_dataset
    from support.tiny import tiny_tokenizer, write_conversations

    rendered: list[int] = []
    data = DataConfig(train=(str(write_conversations(tmp_path / "c.jsonl", 3)),))
    for code, times in (("one", 1), ("one", 1), ("two", 2), ("two", 2)):
        monkeypatch.setattr(cache, "code_digest", lambda code=code: code)
        dataset = build_dataset(data, tiny_tokenizer(), cache_dir=tmp_path, progress=rendered.append)
        assert (len(rendered), dataset.notes) == (3 * times, ())


def test_full_disk_leaves_the_old_file_and_no_leavings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    write_arrays(path, ARRAYS, {"rows": 1})

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match=r"cannot be written.*No space left.*SLIPSTREAM_CACHE"):
        write_arrays(path, ARRAYS, {"rows": 2})
    assert read_arrays(path)[1] == {"rows": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_unusable_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(DataError, match=r"cannot be used.*SLIPSTREAM_CACHE"),
        build_lock(tmp_path / "file" / "a"),
    ):
        raise AssertionError("unreachable")


def test_lock_is_exclusive_and_removes_leavings(tmp_path: Path) -> None:
    path = tmp_path / "a"
    (tmp_path / "a.123-abc.tmp").write_text("torn")
    inside = threading.Event()
    order: list[str] = []

    def second() -> None:
        inside.wait()
        with build_lock(path):
            order.append("second")

    thread = threading.Thread(target=second)
    thread.start()
    with build_lock(path):
        assert not (tmp_path / "a.123-abc.tmp").exists()
        inside.set()
        thread.join(timeout=0.2)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


def test_lock_is_freed_by_death(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from slipstream.data.cache import build_lock\n"
        "with build_lock(Path(sys.argv[1])): os.kill(os.getpid(), 9)"
    )
    source = Path(__file__).resolve().parents[3] / "src"
    subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "a")], env={**os.environ, "PYTHONPATH": str(source)}, check=False
    )
    with build_lock(tmp_path / "a"):
        pass
