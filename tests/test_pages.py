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
COMMAND = re.compile(r"^(?:    | *\$ +)(te-bench .*(?:\\\n.*)*)$", re.MULTILINE)
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
