"""A process that dies, hangs or prints costs no more than the answer it was at; what is not asked is kept from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.compilation import doctor_interview
from slipstream.compilation.doctor_interview import Interview
from slipstream.errors import CompilationError


def fake(directory: Path, package: str, code: str) -> None:
    (directory / package).mkdir()
    (directory / package / "__init__.py").write_text(code, encoding="utf-8")


def ask(mode: str, names: tuple[str, ...], seconds: float = 120, **more):
    with Interview(mode, names, seconds=seconds, **more) as interview:
        return interview.answers()


def test_a_process_that_dies_costs_one_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(tmp_path, "triton", "import os, sys; print('about to die', file=sys.stderr, flush=True); os.abort()")
    fake(tmp_path, "transformers", "__version__ = '5'")
    monkeypatch.syspath_prepend(str(tmp_path))
    answers = ask("packages", ("triton", "transformers"))
    assert answers["triton"] == {"failed": "the process died (SIGABRT): about to die"}
    assert answers["transformers"] == {"version": "5", "failed": ""}


def test_a_process_that_hangs_costs_one_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(tmp_path, "triton", "import time; time.sleep(600)")
    fake(tmp_path, "fla", "__version__ = '9'")
    (tmp_path / "fla" / "utils.py").write_text("", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    answers = ask("packages", ("triton", "fla"), seconds=3)
    assert answers["triton"] == {"failed": "no answer within 3 s"}
    assert answers["fla"] == {"version": "9", "failed": ""}


def test_what_an_import_prints_is_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(tmp_path, "fla", 'print(\'{"name": "fla"}\'); import sys; sys.exit(3)')
    monkeypatch.syspath_prepend(str(tmp_path))
    assert ask("packages", ("fla",)) == {"fla": {"failed": "SystemExit: 3"}}


def test_nowhere_to_write_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(doctor_interview.tempfile, "TemporaryDirectory", full)
    with pytest.raises(CompilationError, match=r"No space left on device.*TMPDIR"):
        Interview("packages", ("torch",))


def test_a_cache_that_cannot_be_used_is_kept_from_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(tmp_path, "triton", "import os; __version__ = os.environ['TRITON_CACHE_DIR']; os.makedirs(__version__)")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton" / "__init__.py" / "no directory"))
    assert "NotADirectoryError" in ask("packages", ("triton",))["triton"]["failed"]
    answer = ask("packages", ("triton",), own_directories=["TRITON_CACHE_DIR"])["triton"]
    assert answer["failed"] == ""
    assert not Path(answer["version"]).exists()


def test_a_working_directory_that_was_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(tmp_path, "triton", "import os; __version__ = os.getcwd()")
    monkeypatch.syspath_prepend(str(tmp_path))
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert ask("packages", ("triton",))["triton"]["failed"] == ""
