"""What Gluon's kernels may not say, for Triton 3.6 does not compile it, though the pinned version does."""

import ast
from pathlib import Path

import pytest

import te_bench.kernels

FILES = [
    path
    for path in sorted(Path(te_bench.kernels.__path__[0]).rglob("*.py"))
    if path.parent.name == "hopper" or "triton.experimental.gluon" in path.read_text()
]


def test_they_are_found() -> None:
    assert {"forward.py", "kernels.py", "gluon.py"} <= {path.name for path in FILES}


def layouts_given(source: str) -> list[str]:
    """Calls of a file's or another's own functions, known by their plain names, that are given an attribute .layout.

    Triton 3.6 takes one for a constant where it has a name, and says of others: no attribute '_flatten_ir'.
    """
    return [
        f"{call.lineno}: {ast.unparse(call)}"
        for call in ast.walk(ast.parse(source))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
        for given in (*call.args, *(keyword.value for keyword in call.keywords))
        if isinstance(given, ast.Attribute) and given.attr == "layout"
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_layout_that_is_given_has_a_name(path: Path) -> None:
    assert not layouts_given(path.read_text())
