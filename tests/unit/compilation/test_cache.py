"""``slipstream cache``: list, pack, unpack and prune."""

from __future__ import annotations

import argparse
import dataclasses
import io
import subprocess
import sys
import zipfile
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from slipstream.compilation import bundle as files
from slipstream.compilation import cache
from slipstream.compilation.bundle import Bundle, read_bundle, write_bundle
from slipstream.compilation.fingerprint import environment
from slipstream.errors import CompilationError, ConfigError

HERE = environment("cpu")


@pytest.fixture(autouse=True)
def _own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "slipstream"))


def put(name: str = "one", *, days: float = 0, **env: Any) -> Path:
    created = (datetime.now(UTC) - timedelta(days=days)).isoformat(timespec="seconds")
    work = {"target": name, "rows": 2, "row length": 64, "anchors": 8, "attention": "flex", "precision": "bfloat16",
            "device": "cuda:0", "drafter.block_size": 16, "drafter.layers": 5}  # fmt: skip
    made = Bundle(environment={**HERE, **env}, work=work, about={"target": f"T-{name}", "graphs": 4},
                  created=created, sections={"torch": name.encode() * 1000})  # fmt: skip
    return write_bundle(files.directory(), made)


def ask(*arguments: str) -> str:
    parser = argparse.ArgumentParser()
    cache.add_arguments(parser)
    out = io.StringIO()
    code = cache.run(parser.parse_args(arguments), Console(file=out, width=200, highlight=False))
    assert code == 0
    return out.getvalue()


def test_an_empty_cache_is_said_and_not_made() -> None:
    assert "no compile bundles" in ask("list")
    assert "nothing to remove" in ask("prune", "--elsewhere")
    assert not files.directory().exists()


def test_the_list_shows_key_size_and_age() -> None:
    path = put(days=3.2, gpu="A GPU", driver="580.1")
    text = ask("list")
    for part in (path.stem, "T-one", "A GPU", "580.1", HERE["torch"], HERE["torch commit"][:10], "3 days", "KiB"):
        assert part in text
    assert "2 x 64 x 8" in text


def test_the_list_names_damaged_files() -> None:
    path = put()
    path.write_bytes(b"nothing")
    text = ask("list")
    assert "not a bundle" in text
    assert path.name in text


def test_the_list_loads_no_torch() -> None:
    put()
    code = (
        "import argparse, sys; from slipstream.compilation import cache; from rich.console import Console\n"
        "p = argparse.ArgumentParser(); cache.add_arguments(p)\n"
        "cache.run(p.parse_args(['list']), Console()); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0


def test_pack_and_unpack_carry_every_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = put("one"), put("two", gpu="Another")
    assert "2 bundles" in ask("pack", "all.zip")
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "elsewhere"))
    assert "2 bundles" in ask("unpack", "all.zip")
    placed = sorted(p.name for p in files.directory().glob("*.bundle"))
    assert placed == sorted([one.name, two.name])
    assert read_bundle(files.directory() / one.name).sections == read_bundle(one).sections
    assert not list(Path.cwd().glob(".*.tmp"))


def test_pack_leaves_damaged_bundles_out_and_says_so() -> None:
    put("one")
    bad = put("two")
    bad.write_bytes(bad.read_bytes()[:-1])
    text = ask("pack", "all.zip")
    assert "1 bundle " in text
    assert bad.name in text


def test_pack_of_nothing_is_an_error() -> None:
    with pytest.raises(CompilationError, match="no whole compile bundles"):
        ask("pack", "all.zip")
    assert not Path("all.zip").exists()


def test_pack_overwrites_nothing_else_than_a_pack() -> None:
    put()
    Path("notes.txt").write_text("mine")
    with pytest.raises(CompilationError, match=r"notes\.txt exists"):
        ask("pack", "notes.txt")
    assert Path("notes.txt").read_text() == "mine"
    ask("pack", "all.zip")
    ask("pack", "all.zip")


def test_pack_into_a_place_that_cannot_be_written_is_one_line() -> None:
    put()
    with pytest.raises(CompilationError, match="cannot be written") as caught:
        ask("pack", "not/there/all.zip")
    assert "\n" not in str(caught.value)


def test_unpack_of_a_missing_file_is_one_line() -> None:
    with pytest.raises(CompilationError, match=r"all\.zip.*No such file"):
        ask("unpack", "all.zip")


@pytest.mark.parametrize("size", [0, 100, -1])
def test_a_truncated_pack_is_refused_and_places_nothing(tmp_path: Path, monkeypatch: Any, size: int) -> None:
    put("one"), put("two")
    ask("pack", "all.zip")
    whole = Path("all.zip").read_bytes()
    Path("all.zip").write_bytes(whole[:size])
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "elsewhere"))
    with pytest.raises(CompilationError, match="not a whole pack"):
        ask("unpack", "all.zip")
    assert not files.directory().exists()


def test_a_pack_with_a_flipped_byte_is_refused_and_places_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    put("one"), put("two")
    ask("pack", "all.zip")
    whole = bytearray(Path("all.zip").read_bytes())
    whole[whole.rindex(b"twotwo") + 2] ^= 1
    Path("all.zip").write_bytes(whole)
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "elsewhere"))
    with pytest.raises(CompilationError, match="not a whole pack"):
        ask("unpack", "all.zip")
    assert not files.directory().exists()


def test_a_name_in_a_pack_does_not_decide_where_a_bundle_goes(tmp_path: Path) -> None:
    content = put().read_bytes()
    with zipfile.ZipFile("evil.zip", "w") as pack:
        pack.writestr("../../evil.bundle", content)
        pack.writestr("../evil.txt", "no bundle")
    with pytest.raises(CompilationError, match=r"it holds '\.\./evil\.txt'"):
        ask("unpack", "evil.zip")
    with zipfile.ZipFile("evil.zip", "w") as pack:
        pack.writestr("../../evil.bundle", content)
    ask("unpack", "evil.zip")
    assert not list(tmp_path.parent.glob("evil*"))
    assert len(list(files.directory().glob("*.bundle"))) == 1


def test_prune_asks_for_what() -> None:
    with pytest.raises(ConfigError, match=r"--elsewhere.*--older-than"):
        ask("prune")
    with pytest.raises(ConfigError, match="-1"):
        ask("prune", "--older-than", "-1")


def test_prune_by_age() -> None:
    old, new = put("old", days=31), put("new", days=29)
    text = ask("prune", "--older-than", "30", "--dry-run")
    assert "would remove" in text
    assert old.name in text
    assert old.exists()
    ask("prune", "--older-than", "30")
    assert not old.exists()
    assert new.exists()


def test_prune_of_those_made_elsewhere_says_what_differs() -> None:
    mine, other = put("mine"), put("other", **{"torch commit": "0123"})
    text = ask("prune", "--elsewhere")
    assert "torch commit is" in text
    assert not other.exists()
    assert mine.exists()


def test_prune_removes_damaged_ones_and_leavings_too() -> None:
    mine = put("mine")
    (files.directory() / f"{mine.name}.damaged").write_bytes(b"x")
    (files.directory() / f".{mine.name}.1-a.tmp").write_bytes(b"x")
    (files.directory() / "broken.bundle").write_bytes(b"x")
    ask("prune", "--older-than", "30", "--dry-run")
    assert len(list(files.directory().iterdir())) >= 4
    ask("prune", "--older-than", "30")
    assert [p.name for p in files.directory().iterdir() if p.name != files.LOCK] == [mine.name]


def test_prune_in_a_directory_that_cannot_be_changed_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    put(days=99)

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(CompilationError, match="cannot be removed"):
        ask("prune", "--older-than", "30")


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA])
def test_a_pack_that_was_packed_again_and_damaged_is_one_line(tmp_path: Path, method: int) -> None:
    content = put().read_bytes()
    pack = tmp_path / "again.zip"
    with zipfile.ZipFile(pack, "w", method) as out:
        out.writestr("one.bundle", content)
    raw = bytearray(pack.read_bytes())
    raw[60:90] = bytes(b ^ 0xFF for b in raw[60:90])
    pack.write_bytes(bytes(raw))
    with pytest.raises(CompilationError, match="again"):
        ask("unpack", str(pack))


def test_an_empty_pack_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "empty.zip", "w"):
        pass
    with pytest.raises(CompilationError, match="holds no bundle"):
        ask("unpack", str(tmp_path / "empty.zip"))


@pytest.mark.parametrize("changes", [{"environment": [1, 2]}, {"created": 5}, {"about": "x"}])
def test_a_sealed_header_of_the_wrong_types_is_damage_and_stops_nothing(changes: dict[str, Any]) -> None:
    good, bad = put("one"), put("two")
    made = read_bundle(bad)
    for name, value in changes.items():
        object.__setattr__(made, name, value)
    bad.write_bytes(files.encode(made))
    text = ask("list")
    assert f"{bad.name}: its header cannot be read" in text
    assert good.stem in text


def test_prune_goes_on_past_what_cannot_be_removed() -> None:
    old = put("old", days=9)
    blocked = files.directory() / "a.bundle.damaged"
    blocked.mkdir()
    (blocked / "x").touch()
    with pytest.raises(CompilationError, match=r"cannot be removed: a\.bundle\.damaged"):
        ask("prune", "--older-than", "5")
    assert not old.exists()


def test_elsewhere_is_refused_where_the_gpus_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    path = put(gpu="A GPU")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(CompilationError, match="CUDA_VISIBLE_DEVICES hides"):
        ask("prune", "--elsewhere")
    assert path.exists()


def test_pack_replaces_no_weights_and_no_bundle(tmp_path: Path) -> None:
    import torch

    bundle = put()
    weights = tmp_path / "model.pt"
    torch.save({"w": torch.ones(2)}, weights)  # a zip file as well
    other = tmp_path / "one.bundle"
    other.write_bytes(bundle.read_bytes())
    for file in (weights, other):
        before = file.read_bytes()
        with pytest.raises(CompilationError, match="is no pack"):
            ask("pack", str(file))
        assert file.read_bytes() == before


def test_what_is_left_of_a_cut_pack_is_told_so_though_an_archive_of_kernels_is_in_it(tmp_path: Path) -> None:
    inner = io.BytesIO()
    with zipfile.ZipFile(inner, "w") as archive:
        archive.writestr("k/k.cubin", b"code")
    made = read_bundle(put())
    bundle = write_bundle(files.directory(), dataclasses.replace(made, sections={"triton": inner.getvalue()}))
    pack = tmp_path / "all.pack"
    ask("pack", str(pack))
    content = pack.read_bytes()
    pack.write_bytes(content[: content.index(bundle.read_bytes()) + bundle.stat().st_size])
    with pytest.raises(CompilationError, match="not a whole pack"):
        ask("unpack", str(pack))
    with pytest.raises(CompilationError, match="is a bundle, not a pack"):
        ask("unpack", str(bundle))
