import dataclasses
import re

import pytest
from journals import (
    HOSTILE,
    attention_records,
    baseline_cell,
    everything,
    ladder_records,
    only_group,
    record,
    result_of,
    step_record,
    trial,
    write,
)

from te_bench.reports.group_result import load_report
from te_bench.reports.page import answers
from te_bench.reports.page.headlines import headlines
from te_bench.reports.page.table import filled, word
from te_bench.reports.page.tables import TABLES, escape, markdown, summary, tables_of, terminal


def table_of(tmp_path, name, records, **settings):
    [table] = tables_of(result_of(tmp_path, records, **settings), name)
    return table


def texts(table):
    return [[value.text for value in row] for row in table.rows]


def test_ladder_of_one_seed(tmp_path):
    table = table_of(tmp_path, "ladder", ladder_records(), baseline=baseline_cell())
    rows = {row[0]: row for row in texts(table)}
    assert [column.title for column in table.columns][:3] == ["Configuration", "ms/step", "Speed-up"]
    assert rows["PyTorch eager bf16, written-out attention (baseline)"][1:3] == ["103.8", "1.00×"]
    assert rows["torch.compile bf16, flash attention"][1:3] == ["27.4", "3.79×"]
    assert "n = 1: one run of each" in table.note
    assert "The MFU of an FP8 configuration is quoted against the bf16 peak." in table.note


def test_ladder_of_three_seeds_has_intervals(tmp_path):
    table = table_of(tmp_path, "ladder", ladder_records(3), baseline=baseline_cell())
    row = next(row for row in texts(table) if row[0] == "torch.compile bf16, flash attention")
    assert row[2].startswith("3.78× [3.77, 3.80]")
    assert row[-1] == "3/3"
    assert "95 % t-intervals" in table.note


def test_a_baseline_of_more_seeds_gives_its_rivals_no_intervals(tmp_path):
    records = [x for x in ladder_records(3) if x.trial.cell == baseline_cell() or x.trial.seed == 0]
    assert "n = 1: one run of each" in table_of(tmp_path, "ladder", records, baseline=baseline_cell()).note


def test_attention_names_the_peer_it_is_compared_with(tmp_path):
    table = table_of(tmp_path, "attention_ratios", attention_records())
    assert table.caption == "How many times as fast as cuDNN"
    rows = {tuple(row[:2]): row[2:] for row in texts(table)}
    assert rows["B4 H32 T2048 D128 causal", "flash"] == ["0.59×"] * 3
    assert {kernel for _, kernel in rows} == {"flash", "memory-efficient"}
    assert table.note == "n = 1: one run of each, so speed-ups have no interval."
    for of in ({"mem_efficient", "manual"}, {"cudnn"}):
        alone = result_of(tmp_path / min(of), [x for x in attention_records() if x.trial.attention in of])
        assert tables_of(alone, "attention_ratios") == []


def timed(kernel, *seconds, **shape):
    """A record for each seed; the backward pass takes as long as the forward pass."""
    return [
        record(trial("attention", kernel, seed=seed, **shape), samples={"forward_s": [s / 2], "backward_s": [s / 2]})
        for seed, s in enumerate(seconds)
    ]


def test_attention_says_what_to_take_for_each_shape_and_how_sure_that_is(tmp_path):
    shapes = [{"length": 1024 << i} for i in range(4)]
    clear, tied, once, alone = shapes
    records = [*timed("gluon", 1.0, 1.1, 1.05, **clear), *timed("cudnn", 2.0, 2.22, 2.09, **clear)]
    records += [*timed("flash", 9.0, 9.1, 9.2, **clear), *timed("triton_fp8", 0.5, 0.55, 0.525, **clear)]
    records += [*timed("gluon", 1.0, 1.2, 1.1, **tied), *timed("cudnn", 1.1, 1.1, 1.15, **tied)]
    records += [*timed("cudnn", 1.0, **once), *timed("flash", 1.5, **once), *timed("gluon", 3.0, **alone)]
    result = result_of(tmp_path, records)
    take, fp8 = tables_of(result, "attention_choice")
    assert [column.title for column in take.columns][1:] == ["Take", "How sure", "ms", "Over the next", "Over cuDNN"]
    first, second, third, last = [row[1:] for row in texts(take)]
    over = "2.00× [1.97, 2.04]"
    assert first == ["te-bench Gluon", "fastest in 3 runs", "1,049", f"{over}, cuDNN", over]
    assert second[:2] == ["te-bench Gluon or cuDNN", "not distinguished in 3 runs"]
    assert third == ["cuDNN", "one run", "1,000", "1.50×, flash", "—"]
    assert last == ["te-bench Gluon", "the only one timed", "3,000", "—", "—"]
    assert "Not distinguished: by paired t-tests" in take.note
    [[_, kernel, sure, ms, ratio]] = texts(fp8)
    assert (kernel, sure, ms) == ("te-bench Triton FP8", "the only one timed", "524.6")
    assert ratio.startswith("4.0")
    shown = answers.answer(load_report([tmp_path / "run"]), "fastest")
    told = " ".join(" ".join(shown).split())
    assert all(f"{row[0]}: {row[1].split(' or ')[0]}" in told for row in texts(take))
    assert "te-bench Gluon on 1; cuDNN and te-bench Gluon not distinguished on 1; cuDNN on 1 in one run" in told


def test_attention_has_the_joules_of_both_passes_where_they_were_counted(tmp_path):
    def rows(records, where):
        table = table_of(tmp_path / where, "attention", records)
        return [column.title for column in table.columns], {tuple(row[:2]): row for row in texts(table)}, table.note

    titles, bare, note = rows(attention_records(), "bare")
    assert "Both, mJ" not in titles
    assert note == ""
    ok = [x for x in attention_records() if x.samples]
    counted = [dataclasses.replace(x, samples={**x.samples, "energy_j": [0.1234]}) for x in ok[:1]] + ok[1:]
    titles, found, note = rows(counted, "counted")
    at = titles.index("Both, mJ")
    assert {key: row[at] for key, row in found.items() if row[at] != "—"} == {
        ("B12 H12 T1024 D64 causal", "memory-efficient"): "123.4"
    }
    assert "Joules" in note
    assert all([*row[:at], *row[at + 1 :]] == bare[key] for key, row in found.items())


def test_what_was_changed_of_a_shape_of_attention_names_its_rows(tmp_path):
    changes = ({}, {"window_left": 511, "window_right": 0}, {"documents": 4}, {"dropout": 0.1})
    samples = {"forward_s": [1.0], "backward_s": [2.0]}
    records = [record(trial("attention", "triton", **change), samples=samples) for change in changes]
    table = table_of(tmp_path, "attention", records)
    shape = "B12 H12 T1024 D64"
    said = ("causal", "window 511:0", "causal 4 documents", "causal dropout 0.1")
    assert [row[:2] for row in texts(table)] == [[f"{shape} {one}", "te-bench Triton"] for one in said]
    assert len({record.trial.name for record in records}) == 4


def test_heads_stand_beside_the_one_of_all_logits_at_their_shape(tmp_path):
    def head(name, n, seed, seconds, gib, **changes):
        of = trial(
            "linear_cross_entropy", "none", n=n, d=4096, vocab=128256, padded=128256, head=name, seed=seed, precision="bf16",
            protocol="kernel", mode="compile" if name == "reference" else "eager",
        )  # fmt: skip
        samples = {"kernel_s": [seconds] * 3, "peak_allocated_bytes": [(gib + 2) * 2**30], "energy_j": [28.5]}
        return record(of, samples=samples, work={"flop": 2.58e13, "held_bytes": 2 * 2**30}, **changes)

    records = [head("chunked", 8192, s, 0.04 - s / 1e4, 1.6) for s in (0, 1)]
    records += [head("reference", 8192, s, 0.05, 3.0) for s in (0, 1)]
    records += [head("chunked", 2048, 0, 0.01, 0.7), record(head("liger", 8192, 0, 1, 1).trial, outcome="unsupported")]
    table = table_of(tmp_path, "heads", records)
    titles = [column.title for column in table.columns]
    assert titles == ["Tokens x width x classes", "Head", "ms", "Speed-up", "TFLOP/s", "GiB", "J", "ok/planned"]
    rows = {tuple(row[:2]): row[2:] for row in texts(table)}
    at = "8192 x 4096 x 128256"
    assert rows[at, "all logits, torch.compile"] == ["50.0", "—", "516.0", "3.00", "28.5", "2/2"]
    assert rows[at, "chunked head"][1].startswith("1.25× [1.2")
    assert rows[at, "chunked head"][3] == "1.60"
    assert rows[at, "Liger (unsupported)"] == ["—"] * 5 + ["0/1"]
    assert rows["2048 x 4096 x 128256", "chunked head"][1] == "—"
    assert "GiB: at the peak" in table.note
    assert "Joules" in table.note
    on_a_cpu = [dataclasses.replace(r, work={"flop": 1.0}, samples={"kernel_s": [1.0]}) for r in records[:4]]
    bare = table_of(tmp_path / "cpu", "heads", on_a_cpu)
    assert "GiB" not in str(bare.columns) + bare.note
    assert "Joules" not in bare.note


def test_pieces_stand_beside_the_compiled_one_at_their_size(tmp_path):
    def piece(backend, seed, seconds, call="forward", n=4096, **changes):
        of = trial(
            "piece", "none", kind="rmsnorm", call=call, m=16384, n=n, backend=backend, seed=seed, precision="bf16",
            protocol="kernel", mode="compile" if backend == "reference" else "eager",
        )  # fmt: skip
        samples = {"kernel_s": [seconds] * 3, "energy_j": [0.05]}
        return record(of, samples=samples, work={"bytes": 4 * 16384 * n}, **changes)

    records = [piece("triton", s, 1e-4 - s * 1e-6) for s in (0, 1)] + [piece("reference", s, 2e-4) for s in (0, 1)]
    records += [piece("triton", 0, 1e-4, n=2048), piece("reference", 0, 3e-4, "add_forward_quantized")]
    records += [record(piece("liger", 0, 1).trial, outcome="unsupported")]
    table = table_of(tmp_path, "pieces", records)
    titles = [column.title for column in table.columns]
    assert titles == ["Piece", "Tokens x width", "By", "ms", "Speed-up", "TB/s", "mJ", "ok/planned"]
    rows = {tuple(row[:3]): row[3:] for row in texts(table)}
    at = "RMSNorm forward", "16384 x 4096"
    assert rows[*at, "torch.compile"] == ["0.200", "—", "1.34", "50.0", "2/2"]
    assert rows[*at, "te-bench"][1].startswith("2.01× [1.89")
    assert rows[*at, "te-bench"][2] == "2.70"
    assert rows[*at, "Liger (unsupported)"] == ["—"] * 4 + ["0/1"]
    assert rows["RMSNorm forward", "16384 x 2048", "te-bench"][1] == "—"
    assert ("sum and RMSNorm forward with the FP8 cast", at[1], "torch.compile") in rows
    assert "TB/s: of all operands, read once, and all results, written once" in table.note
    assert "Joules" in table.note


def test_gemms_stand_beside_cublaslt_with_a_mean_over_their_shapes(tmp_path):
    def gemm(backend, seconds, n=4096, seed=0, **more):
        more = {"dtype": "e4m3", "scales": "tensor", "fast_accum": True} | more
        of = trial(
            "gemm", "none", m=8192, n=n, k=4096, backend=backend, seed=seed, precision="bf16", protocol="kernel", **more
        )
        return record(of, samples={"kernel_s": [seconds] * 3, "energy_j": [0.5]}, work={"flop": 2 * 8192 * n * 4096})

    half = {"dtype": "bf16", "scales": None, "fast_accum": False}
    records = [gemm("scaled_mm", 2e-4), gemm("gluon", 1e-4), gemm("scaled_mm", 4e-4, 6144), gemm("gluon", 4e-4, 6144)]
    records += [gemm("torch", 4e-4, **half), gemm("gluon", 8e-4, **half)]
    table = table_of(tmp_path, "gemms", records)
    rows = {tuple(row[:3]): row[3:] for row in texts(table)}
    fp8 = "FP8, a scale a tensor, fast sums"
    assert rows[fp8, "8192 x 4096 x 4096", "cuBLASLt"][:2] == ["0.200", "—"]
    assert rows[fp8, "8192 x 4096 x 4096", "te-bench Gluon"][1].startswith("2.00×")
    assert rows["bf16", "8192 x 4096 x 4096", "te-bench Gluon"][1].startswith("0.50×")
    assert f"te-bench Gluon, {fp8}: 1.41× [" in table.note


def test_the_fastest_of_parts_alone_are_named_by_shape(tmp_path):
    """By sentence and by bars; a head in FP8 apart from those that compute the same, a single run with its doubt."""

    def one(workload, seed, seconds, mode="eager", **problem):
        of = trial(workload, "none", seed=seed, precision="bf16", protocol="kernel", mode=mode, **problem)
        return record(of, samples={"kernel_s": [seconds + seed * 1e-6] * 3}, work={})

    sizes = {"n": 8192, "d": 4096, "vocab": 128256, "padded": 128256}
    times = {"reference": 0.05, "chunked": 0.04, "fp8": 0.02}
    records = [one("linear_cross_entropy", s, at, head=head, **sizes) for head, at in times.items() for s in (0, 1, 2)]
    for call, backends in (
        ("forward", {"triton": 1e-4, "reference": 2e-4}),
        ("backward", {"triton": 4e-4, "liger": 3e-4}),
    ):
        for backend, at in backends.items():
            problem = {"kind": "rmsnorm", "call": call, "m": 16384, "n": 4096, "backend": backend}
            records += [one("piece", s, at, **problem) for s in ((0, 1, 2) if call == "forward" else (0,))]
    report = load_report([write(tmp_path / "run", records)])
    said = headlines(report)
    assert any(line.startswith("Fastest heads alone: chunked head; on ") for line in said)
    parts = "te-bench on 1; Liger on 1 in one run of each, which may be chance; on "
    assert any(line.startswith(f"Fastest norms and activations alone, of 2 shapes: {parts}") for line in said)
    shown = "\n".join(answers.answer(report, "fastest"))
    for bar, took in (
        ("in FP8 8192 x 4096 x 128256: FP8 head", "20.0 ms"),
        ("8192 x 4096 x 128256: chunked head", "40.0 ms"),
        ("RMSNorm backward 16384 x 4096: Liger", "0.300 ms"),
    ):
        assert re.search(rf"^{re.escape(bar)} .* {re.escape(took)}", shown, re.MULTILINE), shown


def test_a_layer_has_what_a_pass_takes_beyond_what_is_held(tmp_path):
    def layer(name, seed, **work):
        samples = {"latency_s": [0.01] * 3, "peak_allocated_bytes": [(3.0 + seed) * 2**30]}
        return record(trial("layer", "cudnn", layer=name, seed=seed), samples=samples, work=work)

    counted = [layer("te_layer", seed, held_bytes=int(1.5 * 2**30)) for seed in (0, 1)]
    table = table_of(tmp_path, "layer", [*counted, layer("plain_sdpa", 0)])
    place = [column.title for column in table.columns].index("Activations, GiB")
    assert sorted(row[place] for row in texts(table)) == ["2.50", "—"]
    assert "beyond weights, gradients" in table.note
    bare = table_of(tmp_path / "bare", "layer", [layer("te_layer", 0)])
    assert "Activations" not in str(bare.columns) + bare.note


def test_what_was_not_measured_is_a_dash_and_sorts_last(tmp_path):
    failed = record(trial(attention="flex"), outcome="oom", reason="out of memory")
    table = table_of(tmp_path, "ladder", [failed, step_record(trial(), 30)])
    last = table.rows[-1]
    assert [value.text for value in last] == ["PyTorch eager bf16, FlexAttention (oom)", "—", "—", "—", "—", "0/1"]
    assert all(value.sort is None for value in last[1:-1])


def test_columns_without_a_single_value_are_left_out(tmp_path):
    table = table_of(tmp_path, "ladder", [record(trial(), samples={"latency_s": [0.1]})])
    assert [column.title for column in table.columns] == ["Configuration", "ms/step", "ok/planned"]


def test_memory_on_a_cpu_is_resident(tmp_path):
    table = table_of(tmp_path, "memory", [step_record(trial(device="cpu"), 900, 1.5)])
    assert [column.title for column in table.columns] == ["Configuration", "Peak resident, GiB"]
    assert texts(table) == [["PyTorch eager bf16", "1.50"]]


def test_failures_list_every_trial_that_is_not_ok(tmp_path):
    crashed = record(trial(), outcome="crashed", reason="signal 11")
    table = table_of(tmp_path, "failures", [crashed], planned=[trial(seed=1)])
    assert [row[0] for row in texts(table)] == ["crashed", "not run yet"]
    assert [row[2] for row in texts(table)] == ["signal 11", "rerun the same command to go on"]


#: Of convergence runs: test_verdict_tables.py.
VERDICT = {"verdict", "verdict_brief", "losses", "verdict_reasons", "between", "equal_loss", "stability", "stress"}
SCALING = {"scaling", "scaling_memory"}  # of several GPUs: test_scaled.py
ALONE = {"heads", "pieces", "gemms", "benchmarks"}  # by records of their own


def test_every_table_of_a_full_run_and_none_of_an_empty_plan(tmp_path):
    result = only_group(everything(tmp_path / "full"))
    for name in set(TABLES) - VERDICT - SCALING - ALONE:
        [table] = tables_of(result, name)
        assert table.name == name
        assert table.rows
        assert all(len(row) == len(table.columns) for row in table.rows)
        assert not any(value.text in ("0", "0.00", "nan", "None", "") for row in table.rows for value in row[:-1])
        assert markdown(table).count("\n") == len(table.rows) + 2
    empty = result_of(tmp_path, [])
    assert [table for name in TABLES for table in tables_of(empty, name)] == []


def test_underscores_that_markdown_would_read_are_escaped():
    kept = "_cast_kernel, aten::_mm, fused__to_copy_8"  # nothing ends an emphasis
    assert escape(kept) == kept
    assert escape("test[__x__] _a_ train_step _") == r"test\[\_\_x\_\_\] \_a\_ train_step \_"


def test_markdown_keeps_hostile_text_as_text(tmp_path):
    reason = f"{HOSTILE} | `rm` *x* [a](javascript:b) $x$\nsecond line"
    text = markdown(table_of(tmp_path, "failures", [record(trial(), outcome="crashed", reason=reason)]))
    assert "<script" not in text
    assert "\\|" in text
    assert "\\[a\\](" in text
    assert len(text.splitlines()) == 3


def test_word():
    assert (word(None).text, word("").text, word(0).text) == ("—", "—", "0")
    assert word("a\nb").text == "a b"


@pytest.mark.parametrize(
    ("across", "lines"),
    [
        (
            72,
            [
                "Configuration               Verdict       90 %  Pairs  To equal loss",
                "delayed scaling E4M3,  INCONCLUSIVE  [+0.0013,     12          1.25×",
                "  fused, FP8 head                     +0.0061]          [1.24, 1.26]",
                "bf16, A/A                EQUIVALENT  [-0.0025,     12          1.00×",
                "                                      +0.0025]          [0.99, 1.01]",
            ],
        ),
        (
            90,
            [
                "Configuration                      Verdict                90 %  Pairs       To equal loss",
                "delayed scaling E4M3, fused,  INCONCLUSIVE  [+0.0013, +0.0061]     12  1.25× [1.24, 1.26]",
                "  FP8 head",
                "bf16, A/A                       EQUIVALENT  [-0.0025, +0.0025]     12  1.00× [0.99, 1.01]",
            ],
        ),
    ],
)
def test_in_a_narrow_terminal_remarks_go_below_and_then_the_widest_column_gives_way(across, lines):
    titles = ("Configuration", "Verdict", "90 %", "Pairs", "To equal loss")
    name, remark = "delayed scaling E4M3, fused, FP8 head", "11 of 12 pairs share a host"
    cells = [
        (name, "INCONCLUSIVE", "[+0.0013, +0.0061]", "12", f"1.25× [1.24, 1.26] ({remark})"),
        ("bf16, A/A", "EQUIVALENT", "[-0.0025, +0.0025]", "12", f"1.00× [0.99, 1.01] ({remark})"),
    ]
    rows = [dict(zip(titles, map(word, row), strict=True)) for row in cells]
    shown = "\n".join(terminal(filled("x", "", rows, text_columns=2), across)).splitlines()
    assert shown[: len(lines)] == lines
    said = f"To equal loss, {name}; bf16, A/A: {remark}"
    assert " ".join(" ".join(shown[len(lines) :]).split()) == said
    assert max(map(len, shown)) <= across
    wide = "\n".join(terminal(filled("x", "", rows, text_columns=2), 160)).splitlines()
    assert [line.endswith(f"] ({remark})") for line in wide] == [False, True, True]


def test_summary_fits_a_terminal(tmp_path):
    everything(tmp_path / "run")
    text = summary([tmp_path / "run"])
    assert max(map(len, text.splitlines())) <= 100
    assert text.startswith("72 of 84 trials ok\nFastest: torch.compile bf16, cuDNN attention, CUDA graph: 26.1 ms")
    assert "torch.compile bf16, flash attention " in text


def test_summary_of_very_long_names_still_fits(tmp_path):
    long = trial(attention="a" * 300)
    write(tmp_path / "run", [step_record(long, 10)], title="t" * 300)
    assert max(map(len, summary([tmp_path / "run"]).splitlines())) <= 100
