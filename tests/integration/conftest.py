"""Each module of integration tests has a cache of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    patch = pytest.MonkeyPatch()
    patch.setenv("SLIPSTREAM_CACHE", str(tmp_path_factory.mktemp("cache")))
    yield
    patch.undo()
