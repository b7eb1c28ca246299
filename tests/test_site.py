"""The site of `make docs` in headless Chromium: links, search, the gallery's filters; screenshots of both schemes."""

import html
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import matplotlib.image
import pytest
from browser import CHROMIUM, NO_CHROMIUM, chromium, served

from te_bench.reports.page import published

ROOT = Path(__file__).resolve().parents[1]
PROBE = (Path(__file__).parent / "site_probe.html").read_text()
WITHOUT = [name for name in ("mkdocs", "material", "mkdocstrings") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.site,
    pytest.mark.skipif(bool(WITHOUT), reason="no MkDocs: pip install 'te-bench[docs]'"),
]
in_chromium = pytest.mark.skipif(CHROMIUM is None, reason=NO_CHROMIUM)
GROUND = {1: "rgb(255, 255, 255)", 0: "rgb(30, 33, 41)"}  # Material's, light and dark


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    return folder


@pytest.fixture(scope="module")
def url(site: Path) -> Iterator[str]:
    with served(site) as found:
        yield found


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, str]:
    """Every page but 404.html, whose links begin at the server's root, and the reports, which test_page.py opens."""
    found = (path for path in site.rglob("*.html") if path.name != "404.html" and "results" not in path.parts[:-1])
    return {path: path.read_text(encoding="utf-8") for path in found}


def test_every_link_leads_somewhere_and_nothing_is_loaded_from_afar(site: Path, pages: dict[Path, str]) -> None:
    anchors = {path: {"", *re.findall(r'\s(?:id|name)="?([^\s">]+)', page)} for path, page in pages.items()}
    lost = []
    for path, page in pages.items():
        loads = re.findall(r'<(?:link|script|img|iframe)\b[^>]*?\s(?:src|href)="?([^\s">]+)', page)
        assert len(loads) > 3, path
        assert [each for each in loads if urlsplit(each).scheme not in ("", "data")] == [], path
        for link in (*loads, *re.findall(r'<a\b[^>]*?\shref="?([^\s">]+)', page)):
            parts = urlsplit(html.unescape(link))
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            known = parts.fragment.startswith("__") or unquote(parts.fragment) in anchors.get(target, {parts.fragment})
            if not parts.scheme and link != "." and not (target.is_file() and known):
                lost.append(f"{path.relative_to(site)}: {link}")
    assert lost == []
    for style in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?(https?:)?//|@import", style.read_text(encoding="utf-8")), style


def test_without_scripts_the_gallery_has_every_configuration_and_what_made_it(
    site: Path, pages: dict[Path, str]
) -> None:
    runs = list(published.runs(ROOT / "results"))
    groups = [group for run in runs for group in run.results.groups]
    assert len(groups) > 20
    shown = pages[site / "gallery.html"]
    assert shown.count("<tr data-model") == sum(len(group.configurations) for group in groups)
    assert shown.count('class="entry"') == len(groups)
    assert len(re.findall(r"<form [^>]*hidden", shown)) == 2
    assert len({group.environment for group in groups}) == shown.count('<details class="environment"')
    assert "<code>te-bench run speed --model llama3-1b" in shown
    assert "118.1 ms" in shown


def probed(url: str, site: Path, profile: Path, page: str, width: int, scheme: int) -> dict[str, Any]:
    """What site_probe.html saw of a page; drawn: how light its screenshot in `profile` is, from 0, black, to 1."""
    (site / "probe.html").write_text(PROBE.replace("WIDTH", str(width)).replace("PAGE", page))
    picture = profile / f"{Path(page).stem}-{width}-{'light' if scheme else 'dark'}.png"
    flags = [f"--blink-settings=preferredColorScheme={scheme}", f"--window-size={max(width, 500)},1600"]
    document, console = chromium(f"{url}/probe.html", profile, *flags, f"--screenshot={picture}")
    assert console == []
    found = re.search(r'<pre id="found" hidden="">(.+?)</pre>', document, re.DOTALL)
    assert found, document[:2000]
    read: dict[str, Any] = json.loads(html.unescape(found[1]))
    return read | {"drawn": float(matplotlib.image.imread(picture)[400:, :width, :3].mean())}


@in_chromium
@pytest.mark.parametrize("scheme", [1, 0], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_the_gallery_is_filtered_and_environments_are_compared(
    site: Path, url: str, tmp_path: Path, width: int, scheme: int
) -> None:
    found = probed(url, site, tmp_path, "gallery.html", width, scheme)
    assert (found["scroll"], found["wide"], found["ground"]) == (width, [], GROUND[scheme])
    assert (found["drawn"] > 0.8) if scheme else (0.08 < found["drawn"] < 0.35)
    gpus = {entry[0] for entry in found["all"]}
    assert gpus >= {"NVIDIA H100 80GB HBM3", "NVIDIA H200"}
    assert {entry[0] for entry in found["gpu"]} == {"NVIDIA H100 80GB HBM3"}
    assert 0 < len(found["gpu"]) < len(found["all"])
    [[_, opened, *rows]] = found["chosen"]
    assert opened
    assert len(rows) == 4
    assert {(row["model"], row["kind"]) for row in rows} == {("llama3-1b", "te-bench FP8")}
    assert found["said"] == "4 configurations in 1 entry"
    assert found["address"] == "?GPU=NVIDIA+H100+80GB+HBM3&Model=llama3-1b&Configuration=te-bench+fp8"
    assert [entry[2:] for entry in found["reset"]] == [entry[2:] for entry in found["all"]]
    assert found["same"] == "No difference: choose two environments."
    heading, *differences = found["differences"]
    assert heading == ["Setting", "From", "To"]
    assert ["gpu", "NVIDIA H100 80GB HBM3", "NVIDIA H200"] in differences
    assert all(old != new for _, old, new in differences)


@in_chromium
@pytest.mark.parametrize("page", ["index.html", "leaderboard.html", "tutorial.html"])
def test_pages_fit_a_telephone_in_the_dark(site: Path, url: str, tmp_path: Path, page: str) -> None:
    found = probed(url, site, tmp_path, page, 400, 0)
    assert (found["scroll"], found["wide"], found["ground"]) == (400, [], GROUND[0])
    assert 0.08 < found["drawn"] < 0.35


@in_chromium
def test_search_finds_a_page_from_files_and_from_a_server(site: Path, url: str, tmp_path: Path) -> None:
    query = "tutorial.html?q=equivalent"
    document, console = chromium(f"{site.as_uri()}/{query}", tmp_path)
    assert console == []
    from_files = re.findall(r'<a href="([^"]+)" class="md-search-result__link', document)
    for hits in (from_files, probed(url, site, tmp_path, query, 1280, 1)["hits"]):
        assert any("convergence.html" in hit for hit in hits), hits
