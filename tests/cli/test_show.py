"""te-bench show: one question about a run, on a terminal of 80 columns and 24 lines."""

import dataclasses
import io
import re
import shutil
import sys
from pathlib import Path

import journals
import pytest
from in_process import Command

from te_bench.reports.group_result import ReportResult, load_report
from te_bench.reports.page.answers import EIGHTHS, QUESTIONS, answer

RESULTS = Path(__file__).parents[2] / "results" / "h200"
BLOCKS = set(EIGHTHS) - {" "}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return journals.everything(tmp_path_factory.mktemp("show") / "run")


@pytest.fixture(scope="module")
def ladder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    records = [one for one in journals.ladder_records(3) if one.samples]
    return journals.write(tmp_path_factory.mktemp("show") / "ladder", records, baseline=journals.baseline_cell())


@pytest.fixture(scope="module")
def broken() -> ReportResult:
    """A published study whose table is longer than a terminal; a recipe that was broken on purpose diverged."""
    return load_report([RESULTS / "convergence-gpt2"])


@pytest.mark.parametrize("question", [None, *QUESTIONS])
@pytest.mark.parametrize("ascii_only", [False, True])
def test_every_answer_fits_a_terminal(run: Path, question: str | None, ascii_only: bool) -> None:
    lines = answer(load_report([run]), question, ascii_only=ascii_only)
    assert 0 < len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert not ascii_only or all(line.isascii() for line in lines)


@pytest.mark.parametrize("run", ["RUN", "runs/" + 60 * "x"])
def test_a_recipe_broken_on_purpose_is_never_shown_without_these_words(broken: ReportResult, run: str) -> None:
    """A row is shown whole or not at all; what is left out is counted."""
    for question, rest in ((None, f"te-bench show {run} verdict"), ("verdict", "te-bench report shows all")):
        lines = answer(broken, question, run=run)
        assert len(lines) <= 24
        rows = re.split(r"\n(?! )", "\n".join(lines))
        assert all("broken on purpose" in " ".join(row.split()) for row in rows if "DIVERGED" in row)
        assert re.search(rf"\d more lines: {rest}\.", " ".join(lines))


def test_bars_are_sorted_and_as_long_as_what_they_show(command: Command, ladder: Path) -> None:
    done = command("show", ladder, "fastest")
    assert done.code == 0
    assert done.out.startswith("Fastest: torch.compile bf16, cuDNN attention, CUDA graph: 26.1 ms")
    drawn = [line for line in done.out.splitlines() if BLOCKS & set(line)]
    times = [float(line.rpartition("█")[2].lstrip("".join(BLOCKS)).split()[0]) for line in drawn]
    assert len(times) > 5
    assert times == sorted(times)
    lengths = [sum(character in BLOCKS for character in line) for line in drawn]
    assert lengths == sorted(lengths)
    assert lengths[-1] == pytest.approx(lengths[0] * times[-1] / times[0], rel=0.5)
    assert "baseline" in done.out
    assert "3.98× [" in done.out
    assert "\x1b" not in done.out


def test_show_and_advice_tell_one_record_alike(command: Command) -> None:
    """The same verdict, the same names; a time that is the baseline's over a paired speed-up says so."""
    folder = RESULTS / "advise" / "llama-3.2-1b"
    advice = (folder / "advice.md").read_text().replace("\\", "")
    said = " ".join(command("show", folder).out.split())
    judged = re.search(r"no study has judged this step\. (GPT-2 124M[^;]*)", advice)
    assert judged is not None
    assert judged[1] in said
    assert "No study has judged this step" in said
    assert "by its pair with the baseline: te-bench FP8, current scaling" in said
    fastest = command("show", folder, "fastest").out
    assert "of fewer runs than the baseline's, the baseline's ms over the speed-up" in " ".join(fastest.split())
    for name in ("torchao FP8, current scaling", "torchao FP8, rowwise scaling"):
        assert name in fastest
        assert f"| {name}, torch.compile |" in advice


def test_a_terminal_without_blocks_gets_ascii(ladder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from te_bench import cli

    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    monkeypatch.setattr(sys, "argv", ["te-bench", "show", str(ladder), "memory"])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    sys.stdout.flush()
    assert stopped.value.code in (0, None)
    assert "####" in raw.getvalue().decode("ascii")


def test_memory_begins_with_what_takes_least_and_its_part_of_the_baseline(command: Command, ladder: Path) -> None:
    said, heading, least, *others = command("show", ladder, "memory").out.splitlines()
    name, part = re.fullmatch(r"The least: (.+), (\d+) % of the baseline's\.", said).groups()  # type: ignore[union-attr]
    assert name in least
    assert float(least.split()[-1]) <= float(others[0].split()[-1])
    assert heading.startswith("GiB")
    assert 0 < int(part) < 100


def test_memory_of_batches_and_of_ranks_begins_with_a_sentence_too(command: Command, run: Path, tmp_path: Path) -> None:
    lines = command("show", run, "memory").out.splitlines()
    at = lines.index("Sequences of the largest batch that fits")
    name, most, fewest = re.fullmatch(r"The most: (.+), (\d+) sequences; the fewest: (\d+)\.", lines[at - 1]).groups()  # type: ignore[union-attr]
    assert lines[at + 1].startswith(name)
    assert lines[at + 1].endswith(f" {most}")
    assert int(most) > int(fewest)
    one = next(one for one in journals.ladder_records(1) if one.samples)
    alone = journals.write(tmp_path / "alone", [one])
    assert command("show", alone, "memory").out.startswith("One was measured: ")
    ranks = RESULTS / "scaling-te"
    said, heading, least, *_ = command("show", ranks, "memory").out.splitlines()
    assert heading == "GiB at the peak of the fullest rank"
    assert least.startswith(said.removeprefix("The least: ").removesuffix("."))


def test_what_did_not_run_is_said_with_its_reason(command: Command, run: Path, ladder: Path) -> None:
    assert "oom: " in command("show", run, "unsupported").out
    assert command("show", ladder, "unsupported").out == "Every planned trial ended ok.\n"
    assert command("show", ladder, "energy").out.startswith("No energy was recorded")


def test_energy_of_steps_is_shown_the_least_first(command: Command, tmp_path: Path) -> None:
    """12288 tokens a step; a configuration that nobody counted has no bar."""
    records = [one for one in journals.ladder_records(1) if one.samples][:3]
    for place, joules in enumerate((12.288, 6.144)):
        one = records[place]
        records[place] = dataclasses.replace(one, samples={**one.samples, "energy_j": [joules]})
    run = journals.write(tmp_path / "ladder", records, baseline=journals.baseline_cell())
    said, heading, least, most = command("show", run, "energy").out.splitlines()
    assert said.startswith("The least: ")
    assert said.removeprefix("The least: ").partition(",")[0] in least
    assert heading == "mJ a token, of all GPUs"
    assert (least.split()[-1], most.split()[-1]) == ("0.500", "1.000")
    assert "J/step" in command("report", run).out + (run / "report" / "report.md").read_text()


def test_energy_of_layers_is_told_by_variant_for_each_computes_another_function(
    command: Command, tmp_path: Path
) -> None:
    """The MLP alone takes less than any whole layer, and is no answer to which layer takes least."""
    records = []
    for variant, factor in (("fair", 1.0), ("mlp", 0.5)):
        for one in journals.layer_records(variant=variant):
            joules = [factor * one.samples["latency_s"][0]]
            records.append(dataclasses.replace(one, samples={**one.samples, "energy_j": joules}))
    run = journals.write(tmp_path / "layer", records, suite="layer")
    lines = command("show", run, "energy").out.splitlines()
    assert sum(line.startswith("The least: ") for line in lines) == 2
    headings = [line for line in lines if line.startswith("J forward and backward of a layer, ")]
    assert [heading.rpartition(", ")[2] for heading in headings] == ["fair", "mlp"]
    for heading in headings:
        at = lines.index(heading)
        assert lines[at - 1].removeprefix("The least: ").partition(" FP8")[0] in lines[at + 1]


def test_energy_of_attention_is_told_by_shape(command: Command, tmp_path: Path) -> None:
    records = [one for one in journals.attention_records() if one.samples]
    for place, one in enumerate(records):
        records[place] = dataclasses.replace(one, samples={**one.samples, "energy_j": [0.3 - 0.01 * place]})
    run = journals.write(tmp_path / "attention", records, suite="attention")
    lines = command("show", run, "energy").out.splitlines()
    at = lines.index("mJ forward and backward of attention, B12 H12 T1024 D64 causal")
    assert [line.split()[0] for line in lines[at + 1 : at + 4]] == ["cuDNN", "flash", "memory-efficient"]
    assert lines[at + 1].split()[-1] == "280.0"
    assert sum(line.startswith("mJ forward and backward") for line in lines) == 3


def test_without_a_question_what_can_be_asked_and_verbose_says_every_setting(command: Command, ladder: Path) -> None:
    said = command("show", ladder).out
    assert said.startswith("Fastest: ")
    assert " ".join(said.split()).endswith(f"Ask on: te-bench show {ladder} fastest|memory|error")
    said = " ".join(command("show", ladder, "fastest", "--verbose").out.split())
    assert "attention=cudnn, precision=bf16, mode=cudagraph" in said
    assert "padded_vocab=50304" in said


def test_an_error_is_told_in_plain_digits_and_a_step_is_told_from_a_training(command: Command, tmp_path: Path) -> None:
    near, beyond = journals.checked(("loss", 0.0098, 0.01)), journals.checked(("grad", 1.2, 1.1))
    step = dataclasses.replace(journals.step_record(journals.trial(), 10.0), check=near)
    training = dataclasses.replace(
        journals.curve_record(journals.trial("training")), check=journals.checked(("loss", 0.1, 1.0))
    )
    run = journals.write(tmp_path / "near", [step, training])
    lines = command("show", run, "error").out.splitlines()
    names = [re.split(f"[{''.join(BLOCKS)}]", line)[0].strip() for line in lines if BLOCKS & set(line)]
    assert [name.rpartition(", ")[2] for name in names] == ["train step", "training"]
    assert " ".join(lines).startswith(f"Nearest to its limit: {names[0]}, loss: 0.00980 of at most 0.0100.")
    run = journals.write(tmp_path / "beyond", [dataclasses.replace(step, outcome="failed_check", check=beyond)])
    said = command("show", run, "error").out
    assert said.startswith("Beyond its limit: ")
    assert "grad: 1.20 of at most 1.10." in said


def test_bad_input_is_one_sentence(command: Command, ladder: Path, tmp_path: Path) -> None:
    asked = ([ladder, "prettiest"], "unknown question 'prettiest'."), ([tmp_path], "holds no journal.jsonl")
    for arguments, reason in asked:
        done = command("show", *arguments)
        assert (done.code, done.err.count("\n"), reason in done.err) == (2, 1, True)
        assert done.err.startswith("te-bench: ")


def test_the_folder_of_a_gate_is_told_where_its_answer_is(command: Command, ladder: Path, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    for side in ("base", "head"):
        shutil.copytree(ladder, gate / side)
    judge = f"te-bench gate --baseline {gate}/base --candidate {gate}/head"
    for verb in ("show", "report"):
        done = command(verb, gate)
        assert (done.code, done.out) == (2, "")
        assert f"{gate} is the directory of a gate: {gate}/gate.json has its answer, and {judge} judges its" in done.err
    assert command(*judge.split()[1:]).code == 3
