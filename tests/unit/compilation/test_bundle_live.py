"""Bundles of a running process: what it compiled is found again, what is of no use is said and left."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slipstream.compilation import bundle as files
from slipstream.compilation import bundle_live, tuning_results
from slipstream.compilation.bundle import Bundle, write_bundle
from slipstream.compilation.fingerprint import environment
from slipstream.errors import CompilationError

WORK = {"target": "d", "rows": 1}
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "slipstream"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    tuning_results.forget()
    yield
    tuning_results.forget()
    bundle_live.first_step_report()


def put(**changes: Any) -> Path:
    given: dict[str, Any] = {"environment": environment(CPU), "work": WORK, "sections": {"tuning": b"[]"}, **changes}
    return write_bundle(files.directory(), Bundle(**given))


def said(work: dict[str, Any] = WORK) -> tuple[bool, list[str]]:
    lines: list[str] = []
    return bundle_live.load(work, CPU, say=lines.append), lines


def test_a_missing_bundle_is_no_error_and_not_spoken_of() -> None:
    assert said() == (False, [])
    assert bundle_live.first_step_report() is None


def test_a_bundle_is_loaded_and_reported_on_once() -> None:
    path = put()
    loaded, lines = said()
    assert loaded
    assert path.name in lines[0]
    assert (report := bundle_live.first_step_report()) is not None
    assert "0 graphs found, 0 compiled anew; 0 of 0 tuning results used; 0 Triton kernels compiled anew" in report
    assert bundle_live.first_step_report() is None


@pytest.mark.parametrize(
    ("field", "there"), [("torch commit", "0123abcd"), ("gpu", "Another GPU"), ("driver", "570.1"), ("triton", "9.9")]
)
def test_a_bundle_made_elsewhere_is_refused_with_the_field_and_both_values(field: str, there: str) -> None:
    here = environment(CPU)
    put(environment={**here, field: there})
    loaded, (line,) = said()
    assert not loaded
    assert f"{field} is {here[field]} here, {there} there" in line
    assert "refused" in line
    assert "torch is" not in line  # the version string is the same


def test_the_newest_of_several_that_were_made_elsewhere_is_spoken_of() -> None:
    here = environment(CPU)
    for year in ("2025", "2027", "2026"):
        put(environment={**here, "gpu": year}, created=f"{year}-01-01T00:00:00+00:00")
    _, (line,) = said()
    assert "2027 there" in line


def test_a_bundle_under_a_wrong_name_is_refused() -> None:
    path = put(environment={**environment(CPU), "gpu": "Another GPU"})
    path.rename(path.with_name(files.file_name(environment(CPU), WORK)))
    loaded, (line,) = said()
    assert not loaded
    assert "gpu is None here, Another GPU there" in line


def test_other_work_is_not_spoken_of() -> None:
    put(work={**WORK, "rows": 2})
    assert said() == (False, [])


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty"])
def test_a_damaged_bundle_is_said_set_aside_and_met_no_more(damage: str) -> None:
    path = put(sections={"tuning": b"[]", "torch": b"x" * 1000})
    whole = path.read_bytes()
    path.write_bytes({"cut": whole[:-10], "flipped": whole[:-1] + b"y", "empty": b""}[damage])
    loaded, (line,) = said()
    assert not loaded
    assert "is damaged" in line
    assert "set aside as" in line
    assert not path.exists()
    assert said() == (False, [])


def test_a_damaged_bundle_that_cannot_be_set_aside_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    put().write_bytes(b"")

    def refuse(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "replace", refuse)
    _, (line,) = said()
    assert "could not be set aside" in line


def test_a_bundle_that_cannot_be_opened_is_one_warning() -> None:
    path = put()
    path.unlink()
    path.mkdir()
    loaded, (line,) = said()
    assert not loaded
    assert "cannot be read (Is a directory)" in line


@pytest.mark.parametrize("section", [{"torch": b"no artifacts"}, {"tuning": b"{}"}])
def test_a_whole_bundle_with_a_section_of_no_use_is_one_warning(section: dict[str, bytes]) -> None:
    put(sections=section)
    loaded, (line,) = said()
    assert not loaded
    assert "could not be loaded" in line
    assert "\n" not in line


def test_a_torch_cache_that_cannot_be_written_is_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(sections={"torch": b"x"})

    def full(_: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", full)
    loaded, (line,) = said()
    assert not loaded
    assert "No space left on device" in line


def test_nothing_is_looked_at_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    put().write_bytes(b"damaged")
    assert not bundle_live.load_for_run(WORK, CPU, say=pytest.fail)


def test_a_process_that_compiled_nothing_saves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: None)
    monkeypatch.setattr(tuning_results, "collect", list)
    assert bundle_live.save(WORK, CPU) is None
    assert not files.directory().exists()


def test_a_bundle_that_cannot_be_written_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: (b"x", SimpleNamespace(inductor_artifacts=[])))
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "file"))
    with pytest.raises(CompilationError, match="cannot be written"):
        bundle_live.save(WORK, CPU)


# -- directories


def settled() -> list[str]:
    lines: list[str] = []
    bundle_live.settle_caches(lines.append)
    return lines


def test_directories_that_the_user_set_are_kept(tmp_path: Path) -> None:
    assert settled() == []
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "inductor")
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "triton")
    assert not (tmp_path / "inductor").exists()


def test_a_directory_that_cannot_be_written_is_replaced_for_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file" / "inductor"))
    (line,) = settled()
    assert "inductor's cache" in line
    assert "is not a directory" in line
    assert Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).parent.is_dir()
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "triton")
    assert settled() == []


def test_a_full_disk_is_one_warning_for_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle_live, "_LEAST_ROOM", 1 << 62)
    (line,) = settled()
    assert "inductor's cache" in line
    assert "Triton's cache" in line
    assert "MiB free" in line
    assert "no other place" in line


# -- real compilations

CHILD = """
    import sys, time, torch
    from slipstream.compilation import bundle_live, first_call_alone, install
    from slipstream.compilation.bundle import Bundle
    install()
    work, cpu = {"target": "d", "rows": 1}, torch.device("cpu")
    if sys.argv[1] != "save":
        assert bundle_live.load(work, cpu, say=print)
    def f(x, w):
        return (torch.nn.functional.gelu(x @ w) * 2).sum()
    step = first_call_alone(f)
    x, w = torch.randn(8, 16, requires_grad=True), torch.randn(16, 4, requires_grad=True)
    began = time.monotonic()
    step(x, w).backward()
    print(f"seconds {time.monotonic() - began:.2f}")
    if sys.argv[1] == "save":
        path, bundle = bundle_live.save(work, cpu)
        print(path, bundle.about)
    else:
        print(bundle_live.first_step_report())
"""


def in_child(what: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CHILD), what],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_graphs_of_one_process_are_found_by_another_with_cold_caches(tmp_path: Path) -> None:
    assert "'graphs': 2" in in_child("save")
    warm = in_child("save")  # a process that compiles nothing, because its caches are warm, saves all the same
    assert "'graphs': 2" in warm
    told = in_child("load", TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cold"))
    assert "2 graphs found, 0 compiled anew" in told
    assert (tmp_path / "cold").is_dir()  # the user's directory is where they went


def test_kernels_that_cannot_be_put_cost_only_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    from slipstream.compilation import triton_kernels

    def full(kernels: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(triton_kernels, "restore", full)
    put()
    loaded, lines = said()
    assert loaded
    assert "without its 0 Triton kernels, which cannot be put into Triton's cache (No space left on device)" in lines[0]


def test_a_cache_without_a_name_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    lines: list[str] = []
    bundle_live.settle_caches(lines.append)
    assert "its name is empty" in lines[0]
    assert os.environ["TRITON_CACHE_DIR"]
