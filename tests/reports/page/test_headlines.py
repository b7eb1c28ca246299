import dataclasses
import shutil

import pytest
from journals import (
    attention_records,
    baseline_cell,
    curve_record,
    curves,
    ladder_records,
    record,
    step_record,
    trial,
    write,
)

from te_bench.reports.group_result import load_report
from te_bench.reports.page.headlines import headlines
from te_bench.reports.page.published import leaderboard
from te_bench.reports.page.tables import summary


def timed(**times):
    """Steps of these milliseconds by attention, a seed each."""
    return [step_record(trial(attention=name, seed=s), ms) for name, each in times.items() for s, ms in enumerate(each)]


def sentences(tmp_path, records, **settings):
    return headlines(load_report([write(tmp_path / "run", records, **settings)]))


def test_a_winner_that_every_pair_confirms_is_named_with_its_speedup(tmp_path):
    [headline] = sentences(tmp_path, ladder_records(3), baseline=baseline_cell())
    assert headline.startswith("Fastest: torch.compile bf16, cuDNN attention, CUDA graph: 26.1 ms, 3.98× [")
    assert headline.endswith("written-out attention, with 41 % of its peak memory, on NVIDIA H200.")


def test_one_run_of_each_names_the_fastest_and_says_that_nothing_confirms_it(tmp_path):
    [headline] = sentences(tmp_path, ladder_records(), baseline=baseline_cell())
    assert headline == (
        "Fastest in one run of each, which may be chance: torch.compile bf16, cuDNN attention, CUDA graph: "
        "26.1 ms, 3.98× as fast as PyTorch eager bf16, written-out attention, with 41 % of its peak memory, on NVIDIA H200."
    )


def test_a_cpus_times_of_fp8_are_said_to_say_nothing_about_a_gpu(tmp_path):
    def said(precision, device):
        records = [step_record(trial(precision=each, device=device), 100) for each in ("bf16", precision)]
        return "emulated" in sentences(tmp_path / f"{precision}-{device}", records)[-1]

    assert said("fp8", "cpu")
    assert not said("fp8", "cuda")
    assert not said("fp16", "cpu")


def test_a_gpus_times_of_emulated_block_formats_are_said_to_be_that(tmp_path):
    records = [step_record(trial(precision=each, device="cuda"), 100) for each in ("bf16", "fp8")]
    assert "emulated" not in sentences(tmp_path / "fp8", records)[-1]
    records[1] = dataclasses.replace(records[1], work={**records[1].work, "ran": {"block_format_casts": 24}})
    assert sentences(tmp_path / "nvfp4", records)[-1].startswith("MXFP8 and NVFP4 are emulated by bf16 GEMMs")
    records[1] = dataclasses.replace(records[1], kernels=["block_scaled_gemm_kernel", "nvfp4_cast_kernel"])
    assert "emulated" not in sentences(tmp_path / "blackwell", records)[-1]


def test_a_step_that_emulates_a_format_is_on_no_leaderboard(tmp_path):
    (tmp_path / "README.md").write_text("| `speed` | `te-bench run speed` | here |\n")
    (tmp_path / "published.toml").write_text("[speed]\n")
    records = [step_record(trial(precision=each, device="cuda"), 100) for each in ("bf16", "fp8")]
    write(tmp_path / "speed", records, suite="speed")
    [table] = leaderboard(tmp_path)
    assert len(table.rows) == 2
    records[1] = dataclasses.replace(records[1], work={**records[1].work, "ran": {"block_format_casts": 24}})
    shutil.rmtree(tmp_path / "speed")
    write(tmp_path / "speed", records, suite="speed")
    assert leaderboard(tmp_path) == []


def test_noise_names_no_winner_and_says_why(tmp_path):
    """Two demos half an hour apart, on a busy machine of 2 cores, each made another configuration the fastest."""
    busy = {"host_cores": 2, "cpu_others": 1.6, "cpu_idle": 0.01, "cpu_stolen": 0.0, "load_average": 5.0}
    times = {"manual": (410, 90, 130), "math": (260, 310, 70), "flash": (300, 80, 95), "flex": (900, 1300, 1100)}
    records = [
        dataclasses.replace(step_record(trial(attention=name, seed=s, device="cpu"), ms), device_state=busy)
        for name, each in times.items()
        for s, ms in enumerate(each)
    ]
    directory = write(tmp_path / "run", records, baseline=trial(attention="manual", device="cpu").cell)
    [headline, others] = headlines(load_report([directory]))
    assert headline.startswith("Keep the baseline, PyTorch eager bf16, written-out attention: 168.7 ms, on ")
    assert headline.endswith(": none is shown to be faster.")
    assert others.startswith("Not distinguished from it, any may be the fastest: PyTorch eager bf16, flash attention")
    assert others.endswith("3 runs of each; the machine was busy: other programs took 1.6 of 2 cores (load 5.0)).")
    shown = " ".join(summary([directory]).split())
    assert "Fastest:" not in shown
    assert shown.count("not distinguished") == 4


def test_several_runs_that_share_too_few_seeds_are_not_said_to_have_run_once(tmp_path):
    records = timed(flash=(10.0, 10.1, 10.2), cudnn=(12.0, 12.1, 12.2))
    apart = [step_record(trial(attention="math", seed=s), 15.0) for s in range(2, 5)]
    assert sentences(tmp_path / "a", [*records, *apart])[1] == (
        "One configuration shares no two runs, or no GPU, with the fastest, so no interval compares it with these; the "
        "fastest: PyTorch eager bf16, math attention: 15.0 ms."
    )
    both = sentences(tmp_path / "b", [*records, *apart, *timed(manual=(90.0,))])[1]
    assert both.startswith(
        "2 configurations ran once or share no two runs, or no GPU, with the fastest, so no interval compares them"
    )


def test_what_is_slower_than_all_that_are_not_told_apart_is_named(tmp_path):
    records = timed(flash=(10.0, 10.4, 10.2), cudnn=(10.3, 10.3, 10.4), math=(20.0, 20.4, 20.2))
    assert sentences(tmp_path, records) == [
        "Use PyTorch eager bf16, flash attention: 10.2 ms, on NVIDIA H200.",
        "Not distinguished from it, any may be the fastest: PyTorch eager bf16, cuDNN attention (10.3 ms) (only 3 runs "
        "of each).",
        "Fastest of the others: PyTorch eager bf16, math attention: 20.2 ms.",
    ]


def test_of_what_is_not_told_apart_bf16_is_to_be_used_and_the_least_memory(tmp_path):
    """FP8's loss would have to be judged; it is faster here by less than runs vary."""
    ways = (("fp8", "flash", 1), ("bf16", "cudnn", 4), ("bf16", "flash", 2), ("bf16", "manual", 9))
    times = {"flash": (10.0, 10.4, 10.2), "cudnn": (10.1, 10.3, 10.3), "manual": (20.0, 20.4, 20.2)}
    runs = [(*way, seed, ms) for way in ways for seed, ms in enumerate(times[way[1]])]
    records = [step_record(trial(precision=p, attention=name, seed=s), ms, gib) for p, name, gib, s, ms in runs]
    use, others, *rest = sentences(tmp_path, records, baseline=trial(attention="manual").cell)
    assert use.startswith("Use PyTorch eager bf16, flash attention: 10.2 ms, 1.98× [1.9")
    assert use.endswith("PyTorch eager bf16, written-out attention, with 22 % of its peak memory, on NVIDIA H200.")
    assert others.endswith(" Chosen: no FP8, so its loss is not in question; the least memory of those without FP8.")
    assert rest[-1].startswith("These times do not say whether FP8 trains like bf16. ")


@pytest.mark.parametrize(("head", "verdict"), [(None, "INCONCLUSIVE"), ("chunked", "EQUIVALENT")])
def test_the_verdict_on_a_users_step_is_that_of_its_head(tmp_path, head, verdict):
    more = {"parts": "all", "mode": "cudagraph", "precision": "fp8", "recipe": "delayed_scaling_e4m3"}
    *_, said = sentences(tmp_path, [step_record(trial(**more, **({"head": head} if head else {})), 10.0)])
    assert "No study has judged this step. Published: " in said
    assert f"{verdict} within 0.005" in said


def test_two_runs_beside_more_are_too_few_to_rank_and_alike_memory_does_not_decide(tmp_path):
    times = {"flash": (10.0, 10.4, 10.2), "cudnn": (10.1, 10.3, 10.3), "math": (12.0, 18.0)}
    gib = {"flash": 2.42, "cudnn": 2.41, "math": 2.0}
    runs = [(name, seed, ms) for name, each in times.items() for seed, ms in enumerate(each)]
    records = [step_record(trial(attention=name, seed=seed), ms, gib[name]) for name, seed, ms in runs]
    use, others, *_ = sentences(tmp_path, records)
    assert use.startswith("Use PyTorch eager bf16, flash attention: 10.2 ms")
    assert "Not distinguished from it, any may be the fastest: PyTorch eager bf16, cuDNN attention (10.2 ms)" in others
    assert others.endswith(" Too few runs to rank: PyTorch eager bf16, math attention (14.7 ms, 2 runs).")
    assert "least memory" not in others


def test_reserved_memory_is_called_that(tmp_path):
    records = []
    for name, ms, gib in (("flash", 10.0, 2.0), ("manual", 30.0, 4.0)):
        of = trial(attention=name, mode="compile-reduce-overhead")
        records.append(step_record(of, ms, gib))
    (said, *_) = sentences(tmp_path, records, baseline=records[1].trial.cell)
    assert "with 50 % of its reserved memory" in said


def test_beside_times_of_fp8_stands_what_is_published_of_its_convergence(tmp_path):
    def said(**changed):
        fp8 = trial(precision="fp8", recipe="delayed_scaling", **changed)
        records = [step_record(trial(precision="bf16"), 100), step_record(fp8, 50)]
        return sentences(tmp_path / "-".join(["run", *changed.values()]), records)[-1]

    equivalent = (
        "Published: GPT-2 124M, 300 steps: 0.0057 [-0.0004, 0.0145] nat above bf16, EQUIVALENT within 0.02 (results/"
    )
    assert equivalent in said()
    assert said().endswith("; te-bench run convergence --recipes delayed_scaling judges it.")
    unlike = "No study has judged this step. Published: GPT-2 124M with an FP8 head, 100 M tokens: "
    assert unlike in said(blocks="fused")
    assert "nat above bf16, INCONCLUSIVE within 0.005; by delayed scaling E4M3 " in said(blocks="fused")
    assert "No study" not in said(blocks="fused", head="fp8")
    assert said(blocks="fused", head="fp8").endswith("--recipes delayed_scaling --fused judges it.")
    assert "No verdict on this step is published" in said(linears="torchao_tensorwise")
    assert said(optimizer="triton", weights="bf16", states="fp8") == (
        "These times do not say whether bf16 weights and FP8 states train like float32. No verdict on this step is "
        "published; te-bench run convergence --weights bf16 --states fp8 --recipes delayed_scaling judges te-bench's AdamW "
        "with them."
    )


def test_of_what_is_not_told_apart_float32_states_are_to_be_used(tmp_path):
    """Those in FP8 take less memory, and their loss would have to be judged, in bf16 as well."""
    times = {"fp8": (10.0, 10.4, 10.2), None: (10.1, 10.3, 10.3), "bf16": (20.0, 20.4, 20.2)}
    records = [
        step_record(trial(precision="bf16", optimizer="triton", seed=s, **({"states": kept} if kept else {})), ms, gib)
        for (kept, each), gib in zip(times.items(), (1, 4, 2), strict=True)
        for s, ms in enumerate(each)
    ]
    use, others, *_ = sentences(tmp_path, records, baseline=trial(optimizer="triton", states="bf16").cell)
    assert "states" not in use.partition(":")[0]
    assert others.endswith("Chosen: the fewest parts in fewer bits, for its loss.")


def test_single_runs_beside_others_are_named_apart(tmp_path):
    records = timed(flash=(10.0, 10.1, 10.2), cudnn=(12.0, 12.2, 12.1), math=(9.0,), manual=(100.0,))
    assert sentences(tmp_path, records) == [
        "Fastest: PyTorch eager bf16, flash attention: 10.1 ms, on NVIDIA H200.",
        "2 configurations ran once, so no interval compares them with these; the fastest: PyTorch eager bf16, math "
        "attention: 9.00 ms.",
    ]


def test_a_configuration_that_alone_ran_twice_is_no_winner(tmp_path):
    """As of a run that was stopped early."""
    assert sentences(tmp_path, timed(flash=(19.0, 18.0), math=(16.0,), manual=(15.0,))) == [
        "Fastest by too few runs of the same seeds, which may be chance: PyTorch eager bf16, written-out attention: "
        "15.0 ms, on NVIDIA H200."
    ]


def test_a_single_configuration_is_not_the_fastest_of_anything(tmp_path):
    [headline] = sentences(tmp_path, [step_record(trial(), 10)], baseline=trial().cell)
    assert headline == "One configuration was measured: PyTorch eager bf16: 10.0 ms, on NVIDIA H200."


def test_a_sweep_in_which_all_failed(tmp_path):
    failed = [record(trial(seed=seed), outcome="oom", reason="no memory") for seed in range(2)]
    expected = "Nothing was measured: 0 of 3 trials ended ok (2 oom, 1 not run yet)."
    assert sentences(tmp_path, failed, planned=[trial(attention="math")]) == [expected]
    expected = "Nothing was measured: 0 of 0 trials ended ok (none was planned)."
    assert sentences(tmp_path / "empty", []) == [expected]


def test_the_lowest_loss_of_one_seed_is_no_headline(tmp_path):
    [headline] = sentences(tmp_path, [*curves(1), *ladder_records(3)], baseline=baseline_cell())
    assert headline.startswith("Fastest: ")
    [headline] = sentences(tmp_path / "alone", curves(1))
    assert headline == "2 of 3 trials ended ok; none of them ranks configurations."


def test_losses_of_several_seeds_are_told_apart_or_said_not_to_be(tmp_path):
    apart = [
        curve_record(trial("training", precision=precision, seed=seed), offset + 0.02 * seed + wobble * seed % 2)
        for seed in range(3)
        for precision, offset, wobble in (("bf16", 0.0, 0.0), ("fp8", 0.3, 0.001))
    ]
    [headline] = sentences(tmp_path, apart)
    assert headline.startswith("Lowest validation loss (char, text:play.txt, 500 steps): PyTorch eager bf16 (1.4")
    near = [one for one in curves(2) if one.trial.precision != "fp16"]
    [headline] = sentences(tmp_path / "near", near)
    assert headline.startswith(
        "Not distinguished by their lowest validation loss (char, text:play.txt, 500 steps): PyTorch eager bf16"
    )
    assert headline.endswith(", on NVIDIA H200 (2 runs of each).")


def test_attention_alone_says_who_is_the_fastest_on_how_many_shapes(tmp_path):
    [headline] = sentences(tmp_path, attention_records())
    said = "Fastest attention, forward and backward, of 3 shapes: cuDNN on 3 in one run of each, which may be chance"
    assert headline == f"{said}; on NVIDIA H200."
