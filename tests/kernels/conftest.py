"""Where kernels are compiled to, for the tests that look at what became of them."""

from pathlib import Path

import pytest


@pytest.fixture
def folder(pytestconfig: pytest.Config) -> Path:
    """Kept from run to run: Triton compiles only what changed."""
    assert pytestconfig.cache is not None
    return pytestconfig.cache.mkdir("compiled")
