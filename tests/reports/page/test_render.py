import csv
import html.parser
import re
import shutil

import pandas as pd
import pytest
from journals import HOSTILE, baseline_cell, environment, everything, ladder_records, record, step_record, trial, write

from te_bench.experiments import plan, run_options
from te_bench.experiments.spec import Options
from te_bench.experiments.store import Plan, Store
from te_bench.reports.files import write_folder
from te_bench.reports.page.render import write_report


class Page(html.parser.HTMLParser):
    """Every start tag with its attributes, and the text."""

    def __init__(self, content):
        super().__init__()
        self.tags, self.text = [], ""
        self.feed(content)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data

    def count(self, tag):
        return sum(name == tag for name, _ in self.tags)


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    """A report of everything, whose figures are empty SVGs: test_gallery has what they hold and refer to."""
    root = tmp_path_factory.mktemp("full")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("matplotlib.figure.Figure.savefig", lambda figure, stream, **_: stream.write(b"<svg />"))
        return write_report([everything(root / "run")], root / "out").parent


@pytest.mark.usefixtures("undrawn")
def test_the_command_that_repeats_a_run_says_its_options(tmp_path):
    ladder = write_report([write(tmp_path / "ladder", ladder_records(3), baseline=baseline_cell())], tmp_path / "a")
    assert "te-bench run nanogpt --device cuda --seeds 3 --out my-run" in content(ladder.parent)
    problem = {"model": "char", "data": "text:my corpus.txt", "budget_s": 60.0}
    trained = [record(trial("training", precision="bf16", seed=seed, **problem)) for seed in range(2)]
    curves = write_report([write(tmp_path / "curves", trained)], tmp_path / "b")
    expected = "--seeds 2 --data 'char=text:my corpus.txt' --budget 60s --out my-run"
    assert expected in content(curves.parent, "report.md")
    trained = [record(trial("training", precision="bf16", data="random"))]  # in place of the standard library
    curves = write_report([write(tmp_path / "random", trained)], tmp_path / "c")
    assert "--seeds 1 --data char=random --out my-run" in content(curves.parent, "report.md")


def test_the_command_that_repeats_a_run_says_its_model_and_its_part(tmp_path):
    options = Options(device="cpu", seeds=2, model="llama-tiny", batch=2, tokens=32)
    with Store(tmp_path / "run") as store:
        store.add_environment(environment())
        for part in (None, "*fp8*"):
            experiment = plan.resolve("speed", options, only=part)
            store.add_plan(Plan.of(experiment, environment()["id"]))
    write_report([tmp_path / "run"], tmp_path / "out")
    asked = "te-bench run speed --model llama-tiny --batch 2 --tokens 32"
    text = content(tmp_path / "out", "report.md")
    assert f"{asked} --device cpu --seeds 2 --out my-run\n" in text
    assert f"{asked} --only '*fp8*' --device cpu --seeds 2 --out my-run\n" in text


def test_flags_and_lists_are_said_as_the_command_line_takes_them():
    options = Options(device="cuda", recipes=("delayed_scaling", "rowwise_scaling"), fused=True, margin=0.003)
    said = "--recipes delayed_scaling,rowwise_scaling --margin 0.003 --fused"
    assert run_options.words(options) == tuple(said.split())


def content(out, name="index.html"):
    return (out / name).read_text(encoding="utf-8")


def test_every_file_is_written_and_nothing_else(full):
    files = sorted(str(path.relative_to(full)) for path in full.rglob("*") if path.is_file())
    assert files[0].startswith("figures/")
    assert files[-3:] == ["index.html", "records.csv", "report.md"]
    assert len(files) == 3 + 2 * 11


def test_page_asks_for_nothing(full):
    for tag, attributes in Page(content(full)).tags:
        assert tag not in ("img", "iframe", "object", "embed", "base", "form")
        for name, value in attributes.items():
            assert not (name in ("src", "href", "xlink:href") and not (value or "").startswith(("#", "data:"))), value
    assert "@import" not in content(full)
    assert "default-src 'none'" in content(full)


def test_page_has_its_sections_in_order(full):
    anchors = re.findall(r'<section id="([^"]+)"', content(full))
    order = "ladder floor layer curves max-batch attention numerics errors failures kernels configurations"
    assert anchors == [*order.split(), "environment", "reproduce"]
    page = Page(content(full))
    assert page.count("h1") == 1
    assert page.count("figure") == 11
    attention = content(full).partition('<section id="attention">')[2]
    assert attention.index("The kernel to take, both passes") < attention.index("<figure")
    assert "72 of 84" in page.text
    assert "te-bench run nanogpt --device cuda --" in page.text


def test_markdown_links_figures_that_exist(full):
    links = re.findall(r"\]\((figures/[^)]+)\)", content(full, "report.md"))
    assert len(links) == 11
    assert all((full / link).is_file() for link in links)
    written = content(full, "report.md")
    assert written.index("**The kernel to take, both passes**") < written.index("figures/attention.svg")
    assert content(full, "report.md").startswith(
        "# GPT-2 124M on one GPU\n\n**Fastest: torch.compile bf16, cuDNN attention, CUDA graph: 26.1 ms"
    )


def test_a_figure_that_is_no_longer_drawn_goes_and_a_users_own_stays(full, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(full, out)
    links = [out / "figures" / f"{name}.{kind}" for name in ("gone", "mine") for kind in ("svg", "png")]
    for path in links:
        path.write_text("")
    page = out / "report.md"
    page.write_text(page.read_text() + "![a figure](figures/gone.svg)\n")
    files = {str(path.relative_to(full)): path.read_bytes() for path in full.rglob("*") if path.is_file()}
    write_folder(out, files, "report")
    assert [path.stem for path in links if path.exists()] == ["mine", "mine"]
    assert {str(path.relative_to(out)) for path in out.rglob("*.*")} == {*files, "figures/mine.svg", "figures/mine.png"}


def test_records_csv_has_a_line_for_each_planned_trial(full):
    frame = pd.read_csv(full / "records.csv")
    assert len(frame) == 84
    assert (frame["outcome"] == "ok").sum() == 72
    compiled = frame[frame["name"].str.contains("V50304/flash/bf16/compile/s0")].iloc[0]
    assert compiled["latency_s_median"] == pytest.approx(0.0274)
    assert compiled["problem_padded_vocab"] == 50304
    assert frame[frame["outcome"] != "ok"]["latency_s_median"].isna().all()
    assert frame["trial"].is_unique


def test_report_is_replaced_with_the_same_bytes_each_time_and_leaves_no_temporary_file(tmp_path):
    directory = write(tmp_path / "run", [step_record(trial(), 10)])
    write_report([directory], directory)
    before = content(directory)
    write(directory, [step_record(trial(), 10), step_record(trial(attention="math"), 5)])
    write_report([directory], directory)
    assert content(directory) != before
    assert not list(directory.rglob(".*"))
    write_report([directory], tmp_path / "again")
    written = [path for path in directory.rglob("*.*") if path.name != "journal.jsonl"]
    assert len(written) > 5
    for path in written:
        assert path.read_bytes() == (tmp_path / "again" / path.relative_to(directory)).read_bytes(), path.name


def test_hostile_names_stay_text(tmp_path):
    hostile = trial(attention=HOSTILE, model=f'"><img src=x onerror=alert(1)>{HOSTILE}')
    crashed = record(trial(), where=HOSTILE, outcome="crashed", reason=HOSTILE)
    body = environment(HOSTILE, gpu=f"{HOSTILE} GPU", cpu="=1+1")
    body["details"]["packages"] = {HOSTILE: HOSTILE}
    records = [step_record(hostile, 10, where=HOSTILE), crashed]
    directory = write(tmp_path / "run", records, suite=HOSTILE, title=HOSTILE, body=body)
    out = write_report([directory], tmp_path / "out").parent
    page = Page(content(out))
    assert page.count("script") == 1
    assert page.count("img") == 0
    assert HOSTILE in page.text
    assert f"te-bench run '{HOSTILE}' " in page.text  # quoted for a shell
    not_code = [line for line in content(out, "report.md").splitlines() if not line.startswith("    ")]
    assert "<script" not in "\n".join(not_code)
    assert list((out / "figures").glob("*script*")) == []


def test_formulas_do_not_reach_a_spreadsheet(tmp_path):
    records = [record(trial(seed=i), outcome="crashed", reason=r) for i, r in enumerate(("=1+1", "@x", "-9", "plain"))]
    out = write_report([write(tmp_path / "run", records)], tmp_path / "out").parent
    with (out / "records.csv").open(newline="") as stream:
        assert [line["reason"] for line in csv.DictReader(stream)] == ["'=1+1", "'@x", "'-9", "plain"]


@pytest.mark.usefixtures("undrawn")
def test_merged_report_splits_by_environment(tmp_path):
    first = write(tmp_path / "h200", ladder_records(2), baseline=baseline_cell())
    other = environment("env-h100", gpu="NVIDIA H100 80GB HBM3")
    second = write(tmp_path / "h100", ladder_records(1, "env-h100", slower=1.3), baseline=baseline_cell(), body=other)
    out = write_report([first, second], tmp_path / "out").parent
    page = Page(content(out))
    assert page.count("h1") == 1
    assert "Merged from h200, h100." in page.text
    assert "GPT-2 124M on one GPU on NVIDIA H100 80GB HBM3" in page.text
    drawn = {path.name for path in (out / "figures").glob("ladder*.svg")}
    assert drawn == {f"ladder-nanogpt-env-{gpu}.svg" for gpu in ("h100", "h200")}
    frame = pd.read_csv(out / "records.csv")
    assert dict(frame.groupby("run").size()) == {"h100": 11, "h200": 22}
    assert set(frame["environment"]) == {"env-h100", "env-h200"}


@pytest.mark.usefixtures("undrawn")
def test_environments_with_the_same_short_name_keep_their_figures_apart(tmp_path):
    runs = []
    for name in ("abcdefgh-1", "abcdefgh-2"):
        body = environment(name, code=name)
        runs.append(write(tmp_path / name, [step_record(trial(), 10, where=name)], body=body))
    out = write_report(runs, tmp_path / "out").parent
    assert len(list((out / "figures").glob("ladder*.svg"))) == 2


@pytest.mark.parametrize(
    "records",
    [[], [record(trial(), outcome="oom", reason="no memory")], [record(trial())], [record(trial("a new workload"))]],
    ids=["empty plan", "all failed", "ok without samples", "unknown workload"],
)
def test_report_without_numbers(tmp_path, records):
    bare = {"id": "env-h200"}
    out = write_report([write(tmp_path / "run", records, body=bare)], tmp_path / "out").parent
    page = Page(content(out))
    assert page.count("figure") == 0
    assert f"of {len(records)} " in page.text
    assert len(pd.read_csv(out / "records.csv")) == len(records)


def test_device_state_and_throttling_are_told(tmp_path):
    states = [{"sm_clock_hz": 1.98e9, "throttle_reasons": 1}, {"sm_clock_hz": 1.5e9, "throttle_reasons": 0x44}]
    records = [record(trial(seed=i), device_state=state) for i, state in enumerate(states)]
    out = write_report([write(tmp_path / "run", records)], tmp_path / "out").parent
    assert "<dt>SM clock, MHz</dt><dd>1,500 to 1,980</dd>" in content(out)
    assert "<dt>throttling</dt><dd>hardware thermal slowdown; software power cap</dd>" in content(out)


def test_a_study_over_hosts_shows_what_they_were_and_no_host_as_if_of_all(tmp_path):
    clock = {"max_sm_clock_hz": 1.98e9}
    hosts = [
        {"driver": "580.1", "cpu": "EPYC", "cores": 16, "power_limit_w": 700.0, **clock},
        {"driver": "580.2", "cpu": "Xeon", "cores": 8, "power_limit_w": 600.0, **clock},
    ]
    known = environment()
    identity = {k: v for k, v in known["identity"].items() if k not in hosts[0]}
    details = {**known["details"], **hosts[1], "os": "Debian 12", "kernel": "6.1.0", "memory_bytes": 2**40}
    body = {**known, "identity": identity, "details": details}
    records = [record(trial(seed=i), device_state=state) for i, state in enumerate(hosts)]
    page = content(write_report([write(tmp_path / "run", records, body=body)], tmp_path / "out").parent)
    shown = {"driver": "580.1; 580.2", "cpu": "EPYC; Xeon", "cores": "8 to 16"}
    shown |= {"power limit": "600 to 700 W", "max sm clock": "1,980 MHz"}
    assert all(f"<dt>{name}</dt><dd>{value}</dd>" in page for name, value in shown.items())
    assert not any(of_one in page for of_one in ("Debian 12", "6.1.0", "1024.0 GiB"))


def test_out_that_cannot_be_written_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    directory = write(tmp_path / "run", [step_record(trial(), 10)])
    with pytest.raises(ValueError, match="Choose another --out"):
        write_report([directory], tmp_path / "file")


def test_directory_without_a_journal_is_a_clear_error(tmp_path):
    with pytest.raises(ValueError, match="holds no journal"):
        write_report([tmp_path], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_long_title_is_headed_by_its_beginning(tmp_path):
    title = "Transformer Engine's quickstart layer: sequence 2048, batch 4, hidden 4096"
    run = write(tmp_path / "run", [step_record(trial(), 10)], title=title)
    page = write_report([run], tmp_path / "out").read_text()
    assert "<h1>Transformer Engine&#39;s quickstart layer</h1>" in page
    assert "te-bench report: sequence 2048, batch 4, hidden 4096<" in page
