"""Where kernels are compiled to, for the tests that look at what became of them, and the user's own table."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from te_bench.kernels import measured


@pytest.fixture
def folder(pytestconfig: pytest.Config) -> Path:
    """Kept from run to run: Triton compiles only what changed."""
    assert pytestconfig.cache is not None
    return pytestconfig.cache.mkdir("compiled")


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Where the user's table of measured times would be: there is none, nor any left for other tests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = measured.user_table()
    assert path is not None
    path.parent.mkdir(parents=True)
    measured.forget()
    yield path
    measured.forget()
