"""The page in headless Chromium: no console errors, every figure drawn, tables sort, 400 pixels wide, dark mode.

measure.html opens the report in a frame and writes what it measured into its own document, which --dump-dom prints.
"""

import html
import json
import re
from pathlib import Path

import pytest
import run_logs
from browser import CHROMIUM, NO_CHROMIUM, Quiet, chromium, served
from journals import HOSTILE, everything, record, trial, write

from te_bench.reports.convergence.loss_logs import read_arms
from te_bench.reports.convergence.loss_verdict import judge_losses
from te_bench.reports.page.loss_page import write_page
from te_bench.reports.page.render import write_report

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=NO_CHROMIUM)

MEASURE = (Path(__file__).parent / "measure.html").read_text()


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Root folder and URL of a server that holds the report of a full run, and one of a hostile run that all failed."""
    root = tmp_path_factory.mktemp("site")
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


def measured(site, profile, report="full", width=1200, *flags):
    root, url = site
    (root / report / "measure.html").write_text(MEASURE.replace("WIDTH", str(width)))
    document, console = chromium(f"{url}/{report}/measure.html", profile, *flags)
    found = re.search(r'<pre id="found">(.+?)</pre>', document, re.DOTALL)
    assert found, document[:2000]
    return json.loads(html.unescape(found[1])), console


def test_desktop(site, tmp_path):
    Quiet.requested.clear()
    found, console = measured(site, tmp_path)
    assert console == []
    assert [path for path in Quiet.requested if path != "/favicon.ico"] == ["/full/measure.html", "/full/index.html"]
    assert len(found["figures"]) == 10
    for figure in found["figures"]:
        assert figure["width"] > 350, figure
        assert figure["height"] > 80, figure
        assert figure["drawn"] > 10, figure
    ascending, descending, by_name, again = found["sorts"]
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


def test_400_pixels_wide(site, tmp_path):
    found, console = measured(site, tmp_path, "full", 400)
    assert console == []
    assert found["width"] == 400
    assert found["scroll"] == 400
    assert found["title_lines"] <= 2
    assert found["wide"] == []
    for figure in found["figures"]:
        assert 300 < figure["width"] <= 368, figure
        assert figure["text"] > 6, figure


@pytest.mark.parametrize("width", [400, 1280])
def test_the_verdict_on_logs_is_one_page_at_any_width(site, tmp_path, width):
    Quiet.requested.clear()
    found, console = measured(site, tmp_path, "losses", width)
    assert console == []
    assert set(Quiet.requested) - {"/favicon.ico"} == {"/losses/measure.html", "/losses/index.html"}
    assert (found["scroll"], found["wide"]) == (width, [])
    assert len(found["figures"]) == 2
    assert all(figure["drawn"] > 10 and figure["text"] > 6 for figure in found["figures"])


@pytest.mark.parametrize("width", [400, 1200])
def test_a_table_that_is_cut_says_so(site, tmp_path, width):
    """In words above it, and by a shade at its edge until it is scrolled to its end; one that fits says nothing."""
    found, _ = measured(site, tmp_path, "full", width)
    cut = [table for table in found["tables"] if table["hidden"] > 1]
    assert bool(cut) == (width == 400)
    for table in found["tables"]:
        assert (table["cue"] > 10, table["shaded"], table["shaded_at_the_end"]) == (table in cut, table in cut, False)


@pytest.mark.parametrize(
    ("scheme", "ground"), [(1, "rgb(255, 255, 255)"), (0, "rgb(20, 23, 27)")], ids=["light", "dark"]
)
def test_text_can_be_read(site, tmp_path, scheme, ground):
    found, _ = measured(site, tmp_path, "full", 1200, f"--blink-settings=preferredColorScheme={scheme}")
    assert found["ground"] == ground
    for what, ratio in found["contrast"].items():
        assert ratio > 4.5, what  # WCAG 2.1, level AA


def test_hostile_text_runs_nothing(site, tmp_path):
    found, console = measured(site, tmp_path, "hostile")
    assert console == []
    assert found["figures"] == []
    assert found["title"] == f"te-bench: {HOSTILE}"


def test_console_errors_are_seen(site, tmp_path):
    """The measure itself: a page with a broken script, and one whose script the policy refuses, do not pass."""
    root, url = site
    (root / "broken.html").write_text("<script>undefined_function()</script>")
    assert chromium(f"{url}/broken.html", tmp_path)[1]
    report = (root / "full" / "index.html").read_text()
    (root / "injected.html").write_text(report.replace("</main>", "<script>document.title='run'</script></main>"))
    document, console = chromium(f"{url}/injected.html", tmp_path)
    assert "Content Security Policy" in console[0]
    assert "<title>run" not in document
