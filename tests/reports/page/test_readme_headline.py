import dataclasses
import xml.etree.ElementTree as ElementTree

import pytest
from journals import step_record, trial, write

from te_bench.reports.group_result import load_report
from te_bench.reports.page import readme_headline
from te_bench.reports.page.embed import embed

BASELINE = trial(attention="cudnn", mode="compile-reduce-overhead")
OWN = trial(attention="gluon", mode="cudagraph", head="fp8", blocks="fused", precision="fp8", recipe="delayed_scaling")
LADDER = [
    (BASELINE, 25.0),
    (trial(attention="flash", mode="compile"), 24.0),  # faster than the baseline, of the same kind
    (trial(attention="manual"), 100.0),
    (trial(attention="math"), 110.0),
    (trial(mode="compile", precision="fp8", recipe="float8_current_scaling", linears="torchao_tensorwise"), 26.0),
    (OWN, 20.0),
    (trial(attention="gluon", mode="cudagraph", optimizer="triton"), 22.0),
]


def run(folder, ladder, seeds=1):
    runs = [(of, ms, seed) for of, ms in ladder for seed in range(seeds)]
    steps = [step_record(dataclasses.replace(of, seed=s), ms * (1 + 0.01 * s)) for of, ms, s in runs]
    write(folder, steps, baseline=BASELINE.cell)
    [result] = load_report([folder]).groups
    return result


def test_the_fastest_of_each_kind_and_the_baseline_for_its_own(tmp_path):
    found = run(tmp_path / "run", LADDER).fastest
    assert [(one.name, round(one.seconds * 1e3)) for one in found] == [
        ("te-bench FP8", 20),
        ("te-bench bf16", 22),
        ("torch.compile bf16", 25),
        ("torchao FP8", 26),
        ("PyTorch eager bf16, written-out attention", 100),
    ]


def test_the_sentence_names_the_fastest_then_the_baseline(tmp_path):
    said = readme_headline.sentence(run(tmp_path / "run", LADDER))
    assert said.startswith(
        "**te-bench FP8: 20.0 ms. torch.compile bf16: 25.0 ms, 1.25× as long.** te-bench bf16: 22.0 ms"
    )
    assert "PyTorch eager bf16, written-out attention: 100.0 ms, 5.00× as long." in said


def test_an_interval_stands_where_both_ran_in_several_processes(tmp_path):
    assert "[1.25, 1.25] as long.**" in readme_headline.sentence(run(tmp_path / "run", LADDER, seeds=3))


def test_the_sentence_says_what_is_not_distinguished_from_the_fastest(tmp_path):
    steps = [step_record(dataclasses.replace(BASELINE, seed=s), ms) for s, ms in enumerate((25.0, 25.2, 25.1))]
    steps += [step_record(dataclasses.replace(OWN, seed=s), ms) for s, ms in enumerate((25.1, 24.9, 25.0))]
    slower = trial(attention="manual")
    steps += [step_record(dataclasses.replace(slower, seed=s), 100 + s) for s in range(3)]
    write(tmp_path / "run", steps, baseline=BASELINE.cell)
    [result] = load_report([tmp_path / "run"]).groups
    one, other = readme_headline.sentence(result).removeprefix("**").split("** ")
    assert one.startswith("te-bench FP8: 25.0 ms. torch.compile bf16: 25.1 ms, 1.00×")
    assert one.endswith(" as long, not distinguished from it.")
    assert other.endswith(" as long.")


def test_a_page_may_have_the_sentence_without_the_picture(tmp_path):
    found, page = run(tmp_path / "run", LADDER), tmp_path / "README.md"
    page.write_text("<!-- te-bench:table run sentence -->\n<!-- /te-bench:table -->\n")
    assert embed(page, check=False)
    assert readme_headline.sentence(found) in page.read_text()
    assert "headline.svg" not in page.read_text()
    assert not (tmp_path / "run/headline.svg").exists()
    assert embed(page, check=True)


def test_one_kind_alone_is_no_headline(tmp_path):
    with pytest.raises(ValueError, match="two kinds of training step or more; timed: 1"):
        readme_headline.sentence(run(tmp_path / "run", [(BASELINE, 25.0)]))


def test_a_page_has_the_sentence_and_the_picture_and_sees_when_they_are_stale(tmp_path):
    run(tmp_path / "run", LADDER)
    page, picture = tmp_path / "README.md", tmp_path / "run/headline.svg"
    page.write_text("<!-- te-bench:table run headline -->\n<!-- /te-bench:table -->\n")
    assert not embed(page, check=True)
    assert not picture.exists()
    assert embed(page, check=False)
    assert "torch.compile bf16 25.0 ms" in page.read_text()
    assert "](run/headline.svg)" in page.read_text()
    assert "20.0 ms" in "".join(ElementTree.fromstring(picture.read_text()).itertext())
    assert embed(page, check=True)
    picture.write_text("another")
    assert not embed(page, check=True)
