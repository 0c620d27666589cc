"""Caches, disks and environment: found as torch and Triton would find them, tried and not guessed."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from slipstream.compilation import doctor_places
from slipstream.compilation.doctor_places import (
    VARIABLES,
    cache_places,
    compiler,
    environment,
    look_at,
    shared_memory,
    unusable,
)


def test_inductor_and_triton_are_found_as_they_find_themselves(fresh, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TRITON_HOME"):
        monkeypatch.delenv(name, raising=False)
    places = {name: path for name, path, _ in cache_places(Path("own"))}
    assert places["Slipstream"] == Path("own")
    theirs = "from torch._inductor.runtime.cache_dir_utils import default_cache_dir; print(default_cache_dir())"
    assert fresh(theirs) == str(places["inductor"])
    pytest.importorskip("triton")
    assert fresh("from triton import knobs; print(knobs.cache.dir)") == str(places["Triton"])


def test_variables_move_the_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/a")
    monkeypatch.setenv("TRITON_HOME", "/b")
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    assert [str(path) for _, path, _ in cache_places(Path("/c"))] == ["/a", "/b/.triton/cache", "/c"]
    monkeypatch.setenv("TRITON_CACHE_DIR", "/d")
    assert str(cache_places(Path("/c"))[1][1]) == "/d"


def test_a_cache_is_counted_and_tried(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "a").write_bytes(b"12345")
    (tmp_path / "sub" / "b").write_bytes(b"1")
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    found = look_at("inductor", tmp_path, "TORCHINDUCTOR_CACHE_DIR")
    assert (found["files"], found["bytes"], found["complete"]) == (3, 6, True)
    assert found["exists"] is True
    assert found["writable"] is True
    assert found["why_not"] == ""
    assert found["free_bytes"] > 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "gone", "sub"]


def test_a_cache_that_is_not_there_yet_is_not_made(tmp_path: Path) -> None:
    found = look_at("Triton", tmp_path / "x" / "y", "TRITON_CACHE_DIR")
    assert (found["exists"], found["writable"], found["files"], found["bytes"]) == (False, True, 0, 0)
    assert not (tmp_path / "x").exists()


def test_a_cache_that_cannot_be_written_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")
    for path in (tmp_path / "file", tmp_path / "file" / "deeper"):
        found = look_at("Triton", path, "TRITON_CACHE_DIR")
        assert found["writable"] is False
        assert found["why_not"] == f"{tmp_path / 'file'} is not a directory"

    def full(**_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(doctor_places.tempfile, "TemporaryFile", full)
    found = look_at("Triton", tmp_path, "TRITON_CACHE_DIR")
    assert (found["writable"], found["why_not"]) == (False, "No space left on device")


def test_a_cache_where_even_root_can_make_nothing() -> None:
    found = look_at("Triton", Path("/proc/x"), "TRITON_CACHE_DIR")
    assert (found["exists"], found["writable"]) == (False, False)
    assert found["why_not"].startswith("/proc cannot be written")


def test_the_caches_that_cannot_be_used_are_known_by_their_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "new"))
    monkeypatch.setenv("TRITON_CACHE_DIR", "/proc/x")
    assert unusable(tmp_path) == ["TRITON_CACHE_DIR"]
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    assert unusable(tmp_path) == ["TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"]
    assert list(tmp_path.iterdir()) == []


def test_an_empty_name_of_a_cache_bites(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    row = next(row for row in environment() if row["name"] == "TORCHINDUCTOR_CACHE_DIR")
    assert (row["level"], row["cure"]) == ("bites", "unset TORCHINDUCTOR_CACHE_DIR")


def test_a_working_directory_that_was_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor_places.working_directory()["writable"] is True
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "relative")
    assert cache_places(Path("own"))[0][1] == gone / "relative"
    assert look_at("Slipstream", Path("own"), "SLIPSTREAM_CACHE")["exists"] is False
    found = doctor_places.working_directory()
    assert (found["path"], found["exists"], found["writable"]) == (str(gone), False, False)
    assert "removed" in found["why_not"]


def test_a_cache_behind_a_link_that_leads_nowhere(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "unmounted")
    found = look_at("Triton", tmp_path / "link", "TRITON_CACHE_DIR")
    assert (found["exists"], found["writable"]) == (False, False)
    assert found["why_not"] == f"{tmp_path / 'link'} is not a directory"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_cache_in_another_users_home(fresh) -> None:
    with tempfile.TemporaryDirectory() as name:  # pytest's own is closed to other users from the top
        Path(name).chmod(0o755)
        (Path(name) / "home").mkdir(mode=0o700)
        assert "home cannot be written" in fresh(f"""
            import os
            from pathlib import Path
            from slipstream.compilation.doctor_places import look_at
            os.setuid(65534)
            print(look_at("Triton", Path({name!r}, "home", "x", "y"), "TRITON_CACHE_DIR")["why_not"])
        """)


def test_a_large_cache_is_not_counted_for_ever(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / str(number)).write_bytes(b"1")
    assert look_at("Triton", tmp_path, "TRITON_CACHE_DIR", seconds=-1)["complete"] is False


def test_every_variable_is_listed_and_only_those_that_bite_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    assert {row["name"]: row["value"] for row in environment()} == {v.name: None for v in VARIABLES}
    assert not any(row["level"] for row in environment())
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "0")
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    monkeypatch.setenv("TORCHDYNAMO_SUPPRESS_ERRORS", "0")
    monkeypatch.setenv("FLA_DISABLE_TENSOR_CACHE", "1")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    found = {row["name"]: row for row in environment()}
    assert found["TORCH_COMPILE_DISABLE"]["value"] == "0"
    assert found["TORCH_COMPILE_DISABLE"]["level"] == ""
    assert found["TRITON_INTERPRET"]["level"] == ""
    assert found["TORCHDYNAMO_DISABLE"]["level"] == "bites"
    assert found["TORCHDYNAMO_SUPPRESS_ERRORS"]["level"] == "bites"  # torch reads any text as true
    assert found["FLA_DISABLE_TENSOR_CACHE"]["level"] == "note"


def test_torch_reads_the_variables_as_they_are_judged(fresh) -> None:
    code = "import torch._dynamo.config as c; print(c.disable, c.suppress_errors)"
    assert fresh(code, TORCH_COMPILE_DISABLE="1", TORCHDYNAMO_SUPPRESS_ERRORS="0") == "True True"


def test_a_compiler_that_is_named_and_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    assert compiler()["command"] == "no-such-compiler"
    assert compiler()["path"] is None


def test_shared_memory_where_there_is_none(tmp_path: Path) -> None:
    assert shared_memory(tmp_path / "shm") is None
    found = shared_memory(tmp_path)
    assert found is not None
    assert found["total_bytes"] >= found["free_bytes"] > 0


def test_the_driver_is_asked_by_its_own_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\necho '| NVIDIA-SMI 580.65.06    Driver Version: 580.65.06    CUDA Version: 13.0     |'\n",
        encoding="utf-8",
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert doctor_places.driver() == {"version": "580.65.06", "cuda": "13.0"}


def test_the_kernel_tells_the_driver_where_the_tool_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    told = tmp_path / "version"
    told.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (builder)\n",
        encoding="utf-8",
    )
    assert doctor_places.driver(told) == {"version": "580.65.06", "cuda": None}
    assert doctor_places.driver(tmp_path / "none") is None
