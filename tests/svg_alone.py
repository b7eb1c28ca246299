"""Figures drawn as SVG alone, which tells all that a PNG of the same figure does."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from matplotlib.figure import Figure


@contextmanager
def svg_alone() -> Iterator[None]:
    """Each PNG is empty: to draw one takes longer than its SVG."""
    right = Figure.savefig

    def save(figure: Figure, stream: Any, **how: Any) -> None:
        if how["format"] == "svg":
            right(figure, stream, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", save)
        yield
