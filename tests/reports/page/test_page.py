"""Pages that te-bench writes, in headless Chromium: how they look, by Browser.look, what they fetch, what a click does."""

import pytest
import run_logs
from browser import CHROMIUM, NO_CHROMIUM, Quiet, browser, served
from journals import HOSTILE, everything, record, trial, write
from svg_alone import svg_alone

from te_bench.reports.convergence.loss_logs import read_arms
from te_bench.reports.convergence.loss_verdict import judge_losses
from te_bench.reports.page.loss_page import write_page
from te_bench.reports.page.render import write_report

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=NO_CHROMIUM)

FIGURES = """[...document.querySelectorAll("figure svg")].map((svg) => {
  const [frame, ...drawn] = [svg, ...svg.querySelectorAll("path, use, text")].map((each) => each.getBoundingClientRect());
  return {width: frame.width, height: frame.height, drawn: drawn.filter((each) => each.width + each.height).length};
})"""
TABLES = """[...document.querySelectorAll(".table")].filter((e) => e.clientWidth).map((e) => {
  const shade = () => getComputedStyle(e).boxShadow !== "none", shaded = shade();
  const found = {hidden: e.scrollWidth - e.clientWidth, cue: e.previousElementSibling.getBoundingClientRect().height};
  const seen = () => {
    const each = e.querySelector("caption span").getBoundingClientRect();
    return each.left >= 0 && each.right <= innerWidth;
  };
  const captions = [seen()];
  e.scrollLeft = e.scrollWidth;
  e.dispatchEvent(new Event("scroll"));
  return {...found, shaded, shaded_at_the_end: shade(), captions: [...captions, seen()]};
})"""
SORTED = """((place) => {
  const table = document.querySelector("table"), headings = [...table.tHead.rows[0].cells];
  const column = place < 0 ? headings.findIndex((c) => c.innerText.startsWith("tokens/s")) : place;
  headings[column].querySelector("button").click();
  return [headings[column].ariaSort, ...[...table.tBodies[0].rows].map((row) => row.cells[column].innerText)];
})"""
#: A page with each fault that look.js knows.
UGLY = """<!doctype html><meta charset="utf-8"><body style="margin:0; font: 16px/20px sans-serif">
<h1 style="font-size: 40px; line-height: 44px">A title of so many words that a telephone takes three lines for it</h1>
<p style="width: 900px">Wider than the screen, and nothing scrolls to its end,
so that the last of these words are nowhere to be seen by anybody.</p>
<p style="width: 90px; overflow: hidden; white-space: nowrap">te-bench FP8, delayed scaling</p>
<p style="color: #999">faint</p>
<p style="position: absolute; top: 400px">one above</p><p style="position: absolute; top: 403px">the other</p>
<img src="nowhere.png" alt="nowhere">
<svg width="300" height="100" style="position: absolute; top: 500px">
  <defs><clipPath id="frame"><rect x="50" y="10" width="200" height="60"/></clipPath></defs>
  <g id="line2d_1"><path d="M 50 40 L 200 -40" clip-path="url(#frame)" stroke="black"/></g>
  <text x="10" y="90" font-size="4">tiny</text><text x="60" y="90">te-bench \N{HORIZONTAL ELLIPSIS}</text>
  <text x="150" y="90">te-bench \N{HORIZONTAL ELLIPSIS}</text>
</svg>"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Root folder and URL of a server that holds the report of a full run, and one of a hostile run that all failed."""
    root = tmp_path_factory.mktemp("site")
    with svg_alone():
        write_report([everything(root / "run")], root / "full")
    failed = record(trial(attention=HOSTILE), outcome="crashed", reason=HOSTILE)
    write_report([write(root / "bad", [failed], title=HOSTILE)], root / "hostile")
    for side, gap in (("a", 0.0), ("b", 0.0013)):
        for seed in range(3):
            run_logs.nanogpt(
                root / f"{side} {HOSTILE[:40].replace('/', '_')}" / f"s{seed}.log",
                3 + gap * (1 + seed / 9) + seed / 1e3,
            )
    arms = read_arms(*([folder] for folder in sorted(root.glob("[ab] *"))))
    write_page(judge_losses(*arms, margin=0.002), root / "losses" / "index.html")
    with served(root) as url:
        yield root, url


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (400, True)], ids=["1280-light", "400-dark"])
@pytest.mark.parametrize(("page", "figures"), [("full", 11), ("losses", 2), ("hostile", 0)])
def test_a_page_is_one_file_and_looks_right(site, chromium, page, figures, width, dark):
    Quiet.requested.clear()
    chromium.open(f"{site[1]}/{page}/index.html", width, dark=dark)
    assert {path for path in Quiet.requested if path != "/favicon.ico"} == {f"/{page}/index.html"}
    assert not any((found := chromium.look()).values()), found
    assert chromium.run("getComputedStyle(document.body).backgroundColor") == (
        "rgb(20, 23, 27)" if dark else "rgb(255, 255, 255)"
    )
    drawn = chromium.run(FIGURES)
    assert len(drawn) == figures
    assert all((400 if width > 400 else 300) < one["width"] < (700 if width > 400 else 369) for one in drawn), drawn
    assert all(one["height"] > 80 and one["drawn"] > 10 for one in drawn), drawn


def test_a_click_sorts_a_table(site, chromium):
    chromium.open(f"{site[1]}/full/index.html", 1200)
    ascending, descending, by_name, again = (chromium.run(f"{SORTED}({column})") for column in (-1, -1, 0, -1))
    values = [text for text in ascending[1:] if text != "—"]
    assert ascending[0] == "ascending"
    assert [int(text.split()[0]) for text in values] == sorted(int(text.split()[0]) for text in values)
    assert len(values) == 11
    assert ascending[-1] == descending[-1] == "—"
    assert descending[0] == "descending"
    assert descending[1:12] == values[::-1]
    assert by_name[0] == "ascending"
    assert by_name[1].startswith("PyTorch eager bf16, cuDNN")
    assert by_name[-1].startswith("torch.compile bf16, note")
    assert again == ascending


@pytest.mark.parametrize("width", [400, 1200])
def test_a_table_that_is_cut_says_so(site, chromium, width):
    """In words above it, and by a shade at its edge until it is scrolled to its end; one that fits says nothing."""
    chromium.open(f"{site[1]}/full/index.html", width)
    tables = chromium.run(TABLES)
    cut = [table for table in tables if table["hidden"] > 1]
    assert bool(cut) == (width == 400)
    for table in tables:
        assert (table["cue"] > 10, table["shaded"], table["shaded_at_the_end"]) == (table in cut, table in cut, False)
        assert table["captions"] == [True, True]  # it does not scroll with the table


def test_hostile_text_runs_nothing(site, chromium):
    chromium.open(f"{site[1]}/hostile/index.html", 1200)
    assert chromium.run("document.title") == f"te-bench: {HOSTILE}"
    assert chromium.said == []


def test_console_errors_are_seen(site, chromium):
    """The measure itself: a page with a broken script, and one whose script the policy refuses, do not pass."""
    root, url = site
    (root / "broken.html").write_text("<script>undefined_function()</script>")
    chromium.open(f"{url}/broken.html", 400)
    assert "undefined_function is not defined" in chromium.said[0]
    report = (root / "full" / "index.html").read_text()
    (root / "injected.html").write_text(report.replace("</main>", "<script>document.title='run'</script></main>"))
    chromium.open(f"{url}/injected.html", 400)
    assert "Content Security Policy" in chromium.said[0]
    assert chromium.run("document.title") != "run"


def test_every_fault_of_looks_is_seen(site, chromium):
    """The measure itself, again: an ugly page has each of them."""
    root, url = site
    (root / "ugly.html").write_text(UGLY)
    chromium.open(f"{url}/ugly.html", 400)
    found = chromium.look()
    assert {fault for fault, where in found.items() if where} == set(found), found
