"""Where files that can be made again are kept."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from slipstream.places import cache_directory


def test_the_cache_is_where_the_setting_says_or_below_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path))
    assert cache_directory() == tmp_path
    monkeypatch.delenv("SLIPSTREAM_CACHE")
    monkeypatch.setenv("HOME", "/somewhere")
    assert cache_directory() == Path("/somewhere/.cache/slipstream")


def test_a_user_without_a_home_has_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("SLIPSTREAM_CACHE")
    monkeypatch.setattr(Path, "home", nowhere)
    assert cache_directory().parent == Path(tempfile.gettempdir())
