"""The site of `make docs` in headless Chromium: links, search, the gallery's filters, and how every kind of page looks.

A picture of each page that is looked at lies beside the built site; the first line of a failed test's log says where.
"""

import html
import importlib
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from browser import CHROMIUM, NO_CHROMIUM, Browser, browser, served
from matplotlib import pyplot

from te_bench.gate import output
from te_bench.gate.decision import decide
from te_bench.gate.stored_runs import Gate, TimedPairs
from te_bench.reports.page import published, render

ROOT = Path(__file__).resolve().parents[1]
WITHOUT = [name for name in ("mkdocs", "material", "mkdocstrings") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.site,
    pytest.mark.skipif(bool(WITHOUT), reason="no MkDocs: pip install 'te-bench[docs]'"),
]
in_chromium = pytest.mark.skipif(CHROMIUM is None, reason=NO_CHROMIUM)
GROUND = {False: "rgb(255, 255, 255)", True: "rgb(30, 33, 41)"}  # Material's, light and dark
RECORDS = "repository/results/h200"
#: A page of each kind, by its place on the site; those that the site has not are made by `others`.
KINDS = {
    "home": "index.html",
    "readme": "repository/index.html",
    "how-to": "tutorial.html",
    "answer": "advise.html",
    "verdicts": "convergence.html",
    "many gpus": "many-gpus.html",
    "performance": "performance.html",
    "gallery": "gallery.html",
    "leaderboard": "leaderboard.html",
    "contributing": "repository/CONTRIBUTING.html",
    "extending": "extending.html",
    "reference": "reference/commands.html",
    "advice": f"{RECORDS}/advise/llama-3.2-1b/advice/index.html",
    "report": f"{RECORDS}/speed/report/index.html",
    "verdict": f"{RECORDS}/convergence/report/index.html",
    "attention": f"{RECORDS}/attention/report/index.html",
    "comparison": "others/comparison/index.html",
    "gate comment": "others/comment.html",
}
ENTRIES = """[...document.querySelectorAll(".entry")].filter((entry) => entry.checkVisibility()).map((entry) => [
  entry.dataset.gpu, entry.querySelector("details").open,
  ...[...entry.querySelectorAll("tbody tr:not([hidden])")].map((row) => ({...row.dataset}))])"""
CHOOSE = """((form, name, value) => {
  const field = document.querySelector(form).elements[name];
  field.value = value;
  field.dispatchEvent(new Event("input", {bubbles: true}));
})"""
DIFFERENCES = (
    """[...document.querySelectorAll("#differences tr")].map((row) => [...row.cells].map((cell) => cell.innerText))"""
)
#: As a code host shows a comment: its text and its tables, in a column.
COMMENT = """<!doctype html><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<style>
  :root {{ color-scheme: light dark }}
  body {{ max-width: 46rem; margin: 1rem auto; padding: 0 1rem; font: 14px/1.5 sans-serif; overflow-wrap: anywhere }}
  table {{ display: block; overflow-x: auto; border-collapse: collapse }}
  th, td {{ border: 1px solid; padding: .3rem .6rem; overflow-wrap: normal }}
</style>{}"""


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


def test_without_scripts_the_gallery_has_every_configuration_and_what_made_it(site, pages):
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


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module")
def others(site: Path) -> Path:
    """A report of two runs, and a gate's comment as Markdown becomes HTML."""
    folder = site / "others"
    render.write_report([ROOT / "results" / "h200" / run for run in ("speed", "speed-b64")], folder / "comparison")
    ratios = {
        "start of the service": [1.1, 1.12, 1.11, 1.13, 1.12, 1.1, 1.14, 1.11],
        "parse": [1.0, 1.01, 0.99, 1.0] * 2,
    }
    gate = Gate(
        baseline="main (0f2c9a1)",
        candidate="HEAD (77aa31c)",
        margin=0.05,
        alpha=0.05,
        decision=decide(ratios, margin=0.05, looks=(8,)),
        timed=TimedPairs(ratios=ratios),
        compared=16,
    )
    shown = importlib.import_module("markdown").markdown(output.markdown(gate), extensions=["tables"])
    (folder / "comment.html").write_text(COMMENT.format(shown), encoding="utf-8")
    return folder


@in_chromium
@pytest.mark.usefixtures("others")
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_page_looks_right(site, url, chromium, kind, width, dark):
    chromium.open(f"{url}/{KINDS[kind]}", width, dark=dark)
    picture = site.parent / f"{kind.replace(' ', '-')}-{width}-{'dark' if dark else 'light'}.png"
    chromium.picture(picture)
    print(picture)
    assert not any((found := chromium.look()).values()), found
    if KINDS[kind].count("/") == 0:
        assert chromium.run("getComputedStyle(document.body).backgroundColor") == GROUND[dark]


@in_chromium
@pytest.mark.parametrize(("width", "line", "page"), [(1280, 40, 2500), (400, 85, 4500)])
def test_the_gallery_is_a_list_of_a_line_and_a_link_for_each_run(url, chromium, width, line, page):
    chromium.open(f"{url}/gallery.html", width)
    heights = chromium.run("[...document.querySelectorAll('.entry')].map((entry) => entry.offsetHeight)")
    assert len(heights) > 20
    assert max(heights) < line
    links = "[...document.querySelectorAll('.entry')].map((entry) => entry.querySelector('.links a').checkVisibility())"
    assert chromium.run(links) == [True] * len(heights)
    assert chromium.run("document.documentElement.scrollHeight") < page


@in_chromium
@pytest.mark.parametrize("width", [1280, 400])
def test_a_click_on_a_line_of_the_gallery_shows_its_details_and_folds_the_last_one(url, chromium, width):
    chromium.open(f"{url}/gallery.html", width)
    opened = """[...document.querySelectorAll(".entry > details[open]")].map((details) => [
      details.querySelector("b").innerText, [...details.querySelectorAll("dt")].map((name) => name.innerText),
      [...details.parentElement.querySelectorAll(".links a")].every((link) => link.checkVisibility())])"""
    for title in ("llama3-1b, 1 x 8192 tokens", "gpt2-xl, 8 x 1024 tokens"):
        line = f"[...document.querySelectorAll('.entry summary')].find((one) => one.innerText.includes('{title}'))"
        chromium.run(f"{line}.click()")
        chromium.settle()
        [[shown, names, links]] = chromium.run(opened)
        assert shown == title
        assert names[:4] == ["Command", "Commit", "Environment", "Measured"]
        assert links
    assert chromium.run("document.documentElement.scrollHeight") < 7000


@in_chromium
def test_the_gallery_is_filtered_and_environments_are_compared(url: str, chromium: Browser) -> None:
    chromium.open(f"{url}/gallery.html", 1280)
    everything = chromium.run(ENTRIES)
    assert {entry[0] for entry in everything} >= {"NVIDIA H100 80GB HBM3", "NVIDIA H200"}
    chromium.run(f"{CHOOSE}('.filters', 'GPU', 'NVIDIA H100 80GB HBM3')")
    of_gpu = chromium.run(ENTRIES)
    assert {entry[0] for entry in of_gpu} == {"NVIDIA H100 80GB HBM3"}
    assert 0 < len(of_gpu) < len(everything)
    assert not any(entry[1] for entry in of_gpu)
    chromium.run(f"{CHOOSE}('.filters', 'Model', 'llama3-1b')")
    chromium.run(f"{CHOOSE}('.filters', 'Configuration', 'te-bench fp8')")
    [[_, opened, *rows]] = chromium.run(ENTRIES)
    assert opened
    assert len(rows) == 4
    assert {(row["model"], row["kind"]) for row in rows} == {("llama3-1b", "te-bench FP8")}
    assert chromium.run("document.querySelector('.filters output').value") == "4 configurations in 1 entry"
    shown = "[...document.querySelectorAll('.gpu:not([hidden]) > .suite:not([hidden]) > h3')].length"
    assert chromium.run(shown) == 1
    address = "?GPU=NVIDIA+H100+80GB+HBM3&Model=llama3-1b&Configuration=te-bench+fp8"
    assert chromium.run("location.search") == address
    chromium.run("document.querySelector('.filters').reset()")
    chromium.settle()
    chromium.run(f"{CHOOSE}('.filters', 'Suite', 'attention')")
    assert chromium.run("location.search") == "?Suite=attention"
    assert 0 < len(chromium.run(ENTRIES)) < len(everything)
    chromium.run("document.querySelector('.filters').reset()")
    chromium.settle()
    chromium.run(f"{CHOOSE}('.filters', 'Model', 'gpt2')")
    of_model = chromium.run(ENTRIES)
    assert len(of_model) > 1
    assert not any(entry[1] for entry in of_model)
    chromium.run("document.querySelector('.filters').reset()")
    chromium.settle()
    assert not any(entry[1] for entry in chromium.run(ENTRIES))
    assert [entry[2:] for entry in chromium.run(ENTRIES)] == [entry[2:] for entry in everything]
    for side in ("From", "To"):
        chromium.run(f"{CHOOSE}('.differences', '{side}', 'c99a9d6a3a5d2758')")
    same = "No difference: choose two environments."
    assert chromium.run("document.querySelector('#differences').innerText") == same
    chromium.run(f"{CHOOSE}('.differences', 'To', '2976aad80bc7ef25')")
    heading, *differences = chromium.run(DIFFERENCES)
    assert heading == ["Setting", "From", "To"]
    assert ["gpu", "NVIDIA H100 80GB HBM3", "NVIDIA H200"] in differences
    assert all(old != new for _, old, new in differences)
    assert chromium.said == []


@in_chromium
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_table_that_goes_on_beyond_the_screen_has_a_shade_at_that_edge(site, url, chromium, dark):
    chromium.open(f"{url}/attention.html", 400, dark=dark)
    chromium.wait_for("document.querySelector('.md-typeset__scrollwrap') !== null")

    def edges(cut: bool, scrolled: str) -> tuple[bool, bool]:
        """Whether the left and the right edge of the first table that is cut, or is not, differ from the ground."""
        chosen = f"(each) => (each.scrollWidth > each.clientWidth) === {str(cut).lower()}"
        found = chromium.run(f"""((table) => {{
          table.scrollLeft = {scrolled};
          const box = table.getBoundingClientRect();
          return [box.left, box.right, box.top + scrollY];
        }})([...document.querySelectorAll(".md-typeset__scrollwrap")].find({chosen}))""")
        left, right, top = map(round, found)
        chromium.settle()
        chromium.picture(picture := site.parent / "shade.png")
        pixels = pyplot.imread(picture)[top + 4, :, :3]
        at_left, at_right = (
            bool(abs(pixels[x] - pixels[(left + right) // 2]).max() > 0.1) for x in (left + 1, right - 2)
        )
        return at_left, at_right

    assert edges(False, "0") == (False, False)
    assert edges(True, "0") == (False, True)
    assert edges(True, "table.scrollWidth / 3") == (True, True)
    assert edges(True, "table.scrollWidth") == (True, False)


@in_chromium
@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("page", ["attention.html", "gallery.html"])
def test_a_table_that_goes_on_beyond_the_screen_says_so_above_it(url, chromium, page, width):
    chromium.open(f"{url}/{page}", width)
    chromium.run("document.querySelectorAll('.entry > details').forEach((each) => { each.open = true; })")
    chromium.settle()
    tables = chromium.run("""[...document.querySelectorAll(".md-typeset table:not([class])")]
      .filter((table) => table.checkVisibility()).map((table) => {
        const box = table.closest(".gallery .table") ?? table.closest(".md-typeset__scrollwrap");
        const shown = [...document.querySelectorAll(".cue")].filter((cue) => cue.checkVisibility());
        const above = shown.filter((cue) => cue.nextElementSibling === box);
        return [table.getBoundingClientRect().width > box.clientWidth + 1, above.map((cue) => cue.innerText)];
      })""")
    assert tables
    cue = "More columns: scroll the table sideways"
    assert [said for _, said in tables] == [[cue] if cut else [] for cut, _ in tables]
    assert width > 400 or any(cut for cut, _ in tables)


@in_chromium
@pytest.mark.parametrize("as_files", [True, False], ids=["files", "server"])
def test_search_finds_a_page(site: Path, url: str, chromium: Browser, as_files: bool) -> None:
    chromium.open(f"{site.as_uri() if as_files else url}/tutorial.html?q=equivalent", 1280)
    hits = chromium.wait_for("[...document.querySelectorAll('a.md-search-result__link')].map((link) => link.href)")
    assert any("convergence.html" in hit for hit in hits), hits
    assert chromium.said == []
