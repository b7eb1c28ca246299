"""Every command that a page quotes is one that te-bench takes: its name, its options and what they may be."""

import contextlib
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from te_bench.cli import app

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMAND = re.compile(r"^(?:    | *\$ +)(te-bench .*?(?:\\\n.*?)*)$", re.MULTILINE)
ANSWER = re.compile(r"te-bench (FP8|bf16)\b")  # a configuration, in the quoted output of a command
ELIDED = "..."
UsageError = typer.BadParameter.__mro__[1]  # click's, or typer's own copy of it


def commands(page: Path) -> list[str]:
    found = (text.replace("\\\n", " ") for text in COMMAND.findall(page.read_text()))
    return [text for text in found if not ANSWER.match(text)]


def test_readme_takes_a_minute_to_read() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 120
    first = next(place for place, line in enumerate(lines) if COMMAND.match(line))
    assert first < 10


def test_what_runs_where_is_what_the_page_of_gpus_says() -> None:
    """README's rows, by that page's; its columns, by a GPU of each."""
    readme, gpus = (table(page, last) for page, last in (("README.md", "Blackwell"), ("docs/gpus.md", "CPU")))
    rows = {
        "attention, PyTorch's flash": ["attention: flash, PyTorch's"],
        "Triton: attention, norms, activations, AdamW": [
            "attention: triton",
            "norms, activations: triton",
            "AdamW: triton",
        ],
        "attention, Gluon": ["attention: gluon"],
        "FP8, delayed and current scaling": ["recipes: delayed_scaling, float8_current_scaling"],
        "MXFP8, NVFP4": ["recipes: mxfp8_block_scaling, nvfp4_block_scaling"],
    }
    cards = {"CPU": "CPU", "Ampere": "A100", "Ada": "RTX 4090", "Hopper": "H200", "Blackwell": "B200"}
    assert readme.keys() == rows.keys()
    for row, cells in readme.items():
        assert cells.keys() == cards.keys()
        for of in rows[row]:
            said = {gpu: cell for names, cell in gpus[of].items() for gpu in names.split(", ")}
            assert cells == {name: said[gpu] for name, gpu in cards.items()}, row


def table(page: str, last: str) -> dict[str, dict[str, str]]:
    """{first cell of a row: {column: cell}} of a page's one table whose last column is `last`."""
    text = (ROOT / page).read_text()
    [found] = re.findall(rf"^(\|[^\n]*\| {last} \|\n(?:\|.*\n)+)", text, re.MULTILINE)
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in found.splitlines())
    return {name: dict(zip(head[1:], cells, strict=True)) for name, *cells in rows}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_commands_of_a_page_are_taken(page: Path) -> None:
    for command in commands(page):
        parse([word for word in shlex.split(command, comments=True)[1:] if word != ELIDED])


def test_the_pages_quote_commands() -> None:
    assert sum(len(commands(page)) for page in PAGES) > 80


@pytest.mark.parametrize(
    "wrong", ["te-bench rum speed", "te-bench run speed --sedes 3", "te-bench advise --budget 3min"]
)
def test_a_command_that_te_bench_does_not_take_is_found(wrong: str) -> None:
    with pytest.raises(UsageError):
        parse(shlex.split(wrong)[1:])


def parse(words: list[str]) -> None:
    """Raise UsageError for words that te-bench would refuse; nothing is run."""
    command: Any = typer.main.get_command(app)
    while hasattr(command, "resolve_command") and words:
        with command.make_context(command.name, [], resilient_parsing=True) as context:
            context.resilient_parsing = False
            _, command, words = command.resolve_command(context, words)
    with contextlib.suppress(typer.Exit):  # --help
        command.make_context(command.name, list(words))
