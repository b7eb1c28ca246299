"""What `mkdocs build` makes beside docs/*.md: pages of the code and of the records, and a home for every link out of docs/.

A link to ../CONTRIBUTING.md or ../te_bench/models/cost.py is true on GitHub, and here: what is linked becomes a page or a
download under repository/, and so does what that links to.
"""

import os
import posixpath
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from te_bench.experiments.store import load
from te_bench.reports.page import published

ROOT = Path(__file__).resolve().parents[2]
AWAY = "repository/"
LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)\s]*)?\))")
CODE = {".py": "python", ".yml": "yaml", ".toml": "toml", ".txt": "text", ".json": "json"}
LARGE = 50_000  # characters; a longer file is a download
#: results/ as far as its pages are made here: those of `te-bench advise`, of whose answers the repository keeps advice.md.
MADE = tempfile.TemporaryDirectory()
HIDDEN = "---\nsearch:\n  exclude: true\n---\n\n"


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made, then everything that a page links to outside docs/."""
    _answer_again()
    pages = {"gallery.md": f"---\nhide: [toc, navigation]\n---\n\n# Every published record\n\n{_gallery()}"}
    pages |= {f"reference/{name}.md": text for name, text in _reference()}
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    waiting = [file for file in files.documentation_pages() if file.generated_by is None]
    while waiting:
        file = waiting.pop()
        for target in _linked(file):
            if files.get_file_from_path(_home(target)) is None:
                made = _made(target, config)
                files.append(made)
                waiting += [made] if made.src_uri.endswith(".md") else []
    results = (ROOT / "results", Path(MADE.name) / "results")
    for path in sorted({path for run in published.runs(*results) for path in run.files.values()}):
        if files.get_file_from_path(home := f"{AWAY}results/{path}") is None:
            source = next(folder / path for folder in results if (folder / path).is_file())
            files.append(File.generated(config, home, abs_src_path=str(source)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page with its links turned to where this site has their targets."""

    def turned(link: re.Match[str]) -> str:
        target = _target(page.file, link[2])
        home = target and posixpath.relpath(_home(target), posixpath.dirname(page.file.src_uri) or ".")
        return f"{link[1]}{home or link[2]}{link[3]}"

    made = page.file.generated_by is not None and page.file.src_uri.startswith("reference/")
    return markdown if made or _is_code(page.file) else LINK.sub(turned, markdown)


def _answer_again() -> None:
    """Make the pages of each published answer from its records, by the command that its reader would type."""
    here = Path(MADE.name)
    shutil.copytree(ROOT / "examples", here / "examples")
    for journal in sorted((ROOT / "results").glob("*/advise/*/journal.jsonl*")):
        folder = journal.parent.relative_to(ROOT)
        (here / folder).mkdir(parents=True)
        shutil.copyfile(journal, here / folder / journal.name)
        _, _, *sizes = load(journal.parent).plans[-1].asked  # --model, and where its config.json was
        words = ["--model", f"examples/configs/{folder.name}", *sizes, "--out", str(folder), "--recorded"]
        command = [sys.executable, "-c", "from te_bench import cli; cli.main()", "advise", *words]
        paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        done = subprocess.run(
            command, cwd=here, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True
        )
        if not (here / folder / "advice" / "index.html").is_file():
            raise ValueError(f"{' '.join(command[3:])}: {done.stderr or done.stdout}")


def _gallery() -> str:
    lead = (
        "One line for each run whose journal is under results/. A click on it shows the command, the commit, the"
        " environment and every configuration, and folds the line that was open. Any two environments are compared"
        " [at the end](#environments).\n\n"
    )
    entries = published.gallery(ROOT / "results", f"{AWAY}results", Path(MADE.name) / "results")
    return f'{lead}{entries}\n<script src="site/gallery.js"></script>\n'


def _reference() -> Iterator[tuple[str, str]]:
    import typer.main
    from typer.cli import get_docs_for_click

    from te_bench import cli, models

    command = typer.main.get_command(cli.app)
    with command.make_context("te-bench", [], resilient_parsing=True) as context:
        text = get_docs_for_click(obj=command, ctx=context, name="te-bench")
    said = text.replace("# `te-bench`", "# Commands", 1).split("`")
    said[::2] = [words.replace("[", "\\[") for words in said[::2]]  # outside code a bracket would begin a link
    yield "commands", "`".join(said)
    names = (f"::: {module}.{name}" for module, homes in models.HOMES.items() for name in homes)
    yield "models", "\n".join(["# te_bench.models", "", "`import te_bench.models as te`", "", *names])


def _source(file: File) -> str:
    """The path in the repository of what a page is made of."""
    return file.src_uri.removeprefix(AWAY) if file.src_uri.startswith(AWAY) else f"docs/{file.src_uri}"


def _target(file: File, link: str) -> str | None:
    """The path in the repository that a link of a page means; None where it is none."""
    source = _source(file)
    folder = source.removesuffix("/index.md") if source.endswith("/index.md") else posixpath.dirname(source)
    path = posixpath.normpath(posixpath.join(folder, link))
    return path if "://" not in link and not path.startswith("..") and (ROOT / path).exists() else None


def _home(target: str) -> str:
    """Where the site has a file or folder of the repository, as a source of MkDocs."""
    path = ROOT / target
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    if path.is_dir():
        return f"{AWAY}{'results/README.md' if target.startswith('results/') else f'{target}/index.md'}"
    if target.endswith(("/report/report.md", "/advice.md")):  # the same page, with its figures inside
        return f"{AWAY}{target.removesuffix('report.md').removesuffix('.md').rstrip('/')}/index.html"
    return f"{AWAY}{target}.md" if path.suffix in CODE and path.stat().st_size < LARGE else f"{AWAY}{target}"


def _linked(file: File) -> Iterator[str]:
    for link in LINK.finditer(file.content_string) if not _is_code(file) else ():
        target = _target(file, link[2])
        if target and not target.startswith("docs/"):
            yield target


def _is_code(file: File) -> bool:
    """Whether a page shows a file that is no Markdown, where what looks like a link is none."""
    return _source(file).removesuffix(".md").endswith(tuple(CODE))


def _made(target: str, config: Any) -> File:
    """The page or the download of a file or folder of the repository."""
    path, home = ROOT / target, _home(target)
    if path.is_dir():
        names = sorted(
            f"{each.name}/" if each.is_dir() else each.name for each in path.iterdir() if each.name[0] not in "._"
        )
        listed = "\n".join(f"- [{name}]({name})" for name in names)
        return File.generated(config, home, content=f"{HIDDEN}# {target}\n\n{listed}\n")
    if path.suffix == ".md" and not home.endswith(".html"):
        return File.generated(config, home, content=path.read_text(encoding="utf-8"))
    if home.endswith(".md"):
        fence = f"````{CODE[path.suffix]}\n{path.read_text(encoding='utf-8')}\n````"
        return File.generated(config, home, content=f"{HIDDEN}# {target}\n\n{fence}\n")
    if home.endswith("/advice/index.html"):
        path = Path(MADE.name) / home.removeprefix(AWAY)
    return File.generated(config, home, abs_src_path=str(path.with_name(Path(home).name)))
