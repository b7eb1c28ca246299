"""`te-bench plan scaling`: a prediction where an option is the prediction's own, else a suite's plan."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from in_process import Command

from te_bench.cli import budget
from te_bench.reports.group_result import load_report

ROOT = Path(__file__).parents[2]


def test_a_row_for_each_number_of_gpus(command: Command) -> None:
    done = command("plan", "scaling", "--world", 1024, "--link", "400Gb/s")
    lines = done.out.splitlines()
    assert lines[0] == "llama3-8b, 1 x 8192 tokens, bf16, fsdp2, H200 SXM, 400Gb/s a GPU"
    assert [line.split()[0] for line in lines[2:11]] == ["1", "8", "16", "32", "64", "128", "256", "512", "1,024"]
    assert lines[11].startswith("One GPU: 771.2 ms a step of llama3-8b")
    said = " ".join(done.out.split())
    assert "TFLOP/s; predicted are float32 weights and states, whose update takes 43.2 ms more." in said
    assert float(lines[2].split()[1]) == pytest.approx(771.2 + 43.2, abs=0.11)
    assert "median error" in done.out
    assert max(map(len, lines)) <= 103


def test_json_holds_what_the_table_rounds(command: Command) -> None:
    found = json.loads(command("plan", "scaling", "--world=64", "--tflops", 400, "--json").out)
    assert found["one_gpu"] == "400 TFLOP/s over a whole step without its update, as given"
    rows = found["rows"]
    assert [row["world"] for row in rows] == [1, 8, 16, 32, 64]
    assert rows[0]["efficiency"] == 1
    for row in rows:
        assert row["step_s"] == pytest.approx(row["compute_s"] + row["exposed_s"])
        assert row["tokens_per_s_per_gpu"] == pytest.approx(8192 / row["step_s"])


@pytest.mark.parametrize(
    ("options", "worlds"),
    [
        ("--parallel tp --world 8", [1, 2, 4, 8]),
        ("--parallel fsdp2+tp --tp 4 --world 24", [1, 8, 16, 24]),
        ("--parallel hsdp --gpus-per-node 4 --world 16", [1, 4, 8, 16]),
        ("--world 1", [1]),
    ],
)
def test_worlds(command: Command, options: str, worlds: list[int]) -> None:
    found = json.loads(command("plan", "scaling", *options.split(), "--json").out)
    assert [row["world"] for row in found["rows"]] == worlds


def test_from_records_of_scaling_predicts_what_its_report_does(command: Command) -> None:
    records = ROOT / "results/h200/scaling"
    layout = ("--model", "gpt2", "--parallel", "ddp", "--batch", 12, "--world", 2, "--precision", "fp8")
    found = json.loads(command("plan", "scaling", "--from", records, *layout, "--json").out)
    one, two = found["rows"]
    alike = [
        s
        for s in of_scaling(records)
        if (s.project, s.parallel, s.configuration.trial.precision) == ("te-bench", "ddp", "fp8")
    ]
    measured = min((step for step in alike if step.efficiency), key=lambda step: step.latency_s)
    assert one["step_s"] == pytest.approx(measured.latency_s * measured.efficiency.value)  # as it was measured on one
    assert two["step_s"] == pytest.approx(measured.predicted_s)
    assert 1 < two["step_s"] / one["step_s"] < measured.latency_s / one["step_s"]


def of_scaling(records: Path) -> Sequence[Any]:
    [group] = load_report([records]).groups
    return group.scaled


def test_from_records_of_one_gpu(command: Command) -> None:
    records = ROOT / "results/h100/speed-llama3-1b"
    given = ("plan", "scaling", "--from", records, "--gpu", "h100", "--world", 8)
    done = command(*given, "--model", "llama3-1b", "--json")
    found = json.loads(done.out)
    assert found["one_gpu"].startswith("154.2 ms a step of llama3-1b, 1 x 8192 tokens, bf16, train_step/llama3-1b")
    assert found["rows"][0]["step_s"] == pytest.approx(0.1542, rel=1e-3)  # as it was measured
    other = json.loads(command(*given, "--model", "llama3-8b", "--only", "*/compile*", "--json").out)["one_gpu"]
    assert "/bf16/compile" in other
    assert other.endswith("scaled to the asked step by FLOP")


def test_what_is_known_of_an_h100_is_what_is_published(command: Command) -> None:
    asked = ("plan", "scaling", "--gpu", "h100", "--model", "llama3-1b", "--world", 1, "--json")
    for precision in ("bf16", "fp8"):
        known, recorded = (
            json.loads(command(*asked, "--precision", precision, *more).out)["rows"][0]["step_s"]
            for more in ((), ("--from", ROOT / "results/h100/speed-llama3-1b"))
        )
        assert known == pytest.approx(recorded, rel=0.01)


def test_validation_shows_every_figure(command: Command) -> None:
    text = command("plan", "scaling", "--validate").out
    rows = json.loads(command("plan", "scaling", "--validate", "--json").out)
    assert len(rows) == 29
    assert text.count("fitted\n") == 5
    assert all(row["source"] in " ".join(text.replace("-\n    ", "-").split()) for row in rows)


def test_the_pages_quote_what_is_predicted(command: Command) -> None:
    def row(world: int, *more: str) -> dict[str, Any]:
        asked = ("plan", "scaling", "--world", world, *more, "--json")
        found: dict[str, Any] = json.loads(command(*asked).out)["rows"][-1]
        return found

    def gib(of: dict[str, Any]) -> str:
        return f"{sum(of['memory_bytes'].values()) / 2**30:.0f}"

    many = " ".join((ROOT / "docs/many-gpus.md").read_text().split())
    divided, replicated = (row(8, "--model", "llama3-1b", "--parallel", mode) for mode in ("fsdp2", "ddp"))
    faster = divided["tokens_per_s_per_gpu"] / replicated["tokens_per_s_per_gpu"] - 1
    assert f"Llama 3.2 1B takes {gib(replicated)} GiB under `ddp`" in many
    assert f"`fsdp2` is predicted {faster:.0%}".replace("%", " %") in many
    eight = f"Llama 3 8B takes {gib(row(8, '--parallel', 'ddp'))} GiB under `ddp`, and {gib(row(8))} on each of 8 GPUs"
    assert eight in many
    most = row(1024, "--link", "400Gb/s")
    said = f"does {most['tokens_per_s_per_gpu']:,.0f} tokens/s on each of 1,024 H200, {100 * most['efficiency']:.0f} %"
    assert f"{said} of one alone" in " ".join((ROOT / "docs/plan-scaling.md").read_text().split())


def test_the_page_has_the_table_of_today(command: Command) -> None:
    assert command("embed", "--check", ROOT / "docs/plan-scaling.md").code == 0


def test_without_an_option_of_its_own_it_is_a_suite(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(suite: str, *_: object, **__: object) -> None:
        raise ValueError(f"the suite {suite} was asked for")

    monkeypatch.setattr(budget, "resolve_with_seeds", resolve)
    for arguments in ("scaling", "scaling --model llama3-8b --batch 1", "speed --only scaling"):
        suite, *_ = words = arguments.split()
        assert command("plan", *words)[::2] == (2, f"te-bench: the suite {suite} was asked for\n")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--link 400", "--link 400: give the bandwidth of one GPU to other nodes, such as 400Gb/s or 50GB/s"),
        ("--link 0Gb/s", "--link 0Gb/s: give the bandwidth of one GPU"),
        ("--world 12", "--world 12 is no multiple of --gpus-per-node 8: give whole nodes"),
        ("--world 8 --parallel ddp2", "unknown mode of parallelism 'ddp2'. Did you mean ddp"),
        (
            "--world 8 --parallel zero1",
            "--parallel zero1 is not predicted: its communication after the update is not modelled.",
        ),
        ("--world 0", "--world 0: give 1 to 131072"),
        ("--tp 0", "--tp 0: give 1 or more"),
        ("--gpus-per-node 73", "--gpus-per-node 73: give 1 to 72"),
        ("--world 8 --precision fp4", "unknown precision 'fp4'. Did you mean fp8?"),
        ("--world 8 --recompute some", "unknown recompute 'some'."),
        ("--world 8 --gpu b200", "unknown GPU 'b200'. Did you mean h200"),
        ("--world 8 --model llama3-80b", "unknown model 'llama3-80b'. Did you mean llama3-8b"),
        ("--tp 4", "--tp 4 goes with --parallel fsdp2+tp; fsdp2 cuts no layer"),
        ("--async-tp", "--async-tp goes with --parallel tp or fsdp2+tp; fsdp2 cuts no layer"),
        ("--parallel fsdp2+tp --tp 3", "--tp 3 does not divide the 8 groups of keys and values of llama3-8b"),
        ("--parallel fsdp2+tp --tp 8 --world 4", "--tp 8 does not divide --world 4: give a divisor"),
        ("--parallel fsdp2+tp --tp 16", "--tp 16 is more than --gpus-per-node 8: a layer's collectives over nodes"),
        ("--parallel tp --world 16", "--parallel tp --world 16 is more than --gpus-per-node 8"),
        ("--parallel tp --world 8 --tp 4", "--tp 4: under --parallel tp all of --world 8 share a layer"),
        ("--tflops 4000", "--tflops 4000: give more than 0 and at most the 989.5 of an h200 in bf16"),
        ("--tflops nan", "--tflops nan: give more than 0"),
        ("--tflops 4 --from x", "--from and --tflops both give the speed of one GPU: give one of them"),
        ("--world 8 --only x", "--only x chooses among the trials of --from DIR: give that, too"),
        ("--from nowhere", "nowhere holds no journal.jsonl"),
        ("--validate --world 8", "--validate compares with published figures and takes no --world: leave it out"),
    ],
)
def test_what_cannot_be_is_one_sentence(command: Command, options: str, said: str) -> None:
    done = command("plan", "scaling", *options.split())
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"te-bench: {said}")
    assert done.err.count("\n") == 1
