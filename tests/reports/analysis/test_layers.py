"""The layer benchmark in the report: variants apart, other functions marked, kernels by kind."""

import dataclasses
import re
from pathlib import Path

import pytest
from journals import LAYERS, layer_records, layer_trial, only_group, record, write

from te_bench.reports.analysis import layers
from te_bench.reports.group_result import load_report
from te_bench.reports.page.headlines import headlines
from te_bench.reports.page.tables import summary, tables_of

BASELINE = layer_trial(*LAYERS[0][:4], variant="faithful", mask="full", dropout=0.1)


def run(tmp_path, records):
    return write(tmp_path / "run", records, suite="layer", title="The layer", baseline=BASELINE.cell)


def both(seeds=1):
    """The faithful variant with te_layer, but not plain, causal; the fair one causal throughout."""
    faithful = []
    for one in layer_records(seeds, variant="faithful", dropout=0.1, mask="full"):
        if one.trial.problem["layer"].startswith("te_"):
            problem = {**one.trial.problem, "mask": "causal"}
            one = dataclasses.replace(one, trial=dataclasses.replace(one.trial, problem=problem))
        faithful.append(one)
    return [*faithful, *layer_records(seeds)]


def result_of(tmp_path, records):
    return only_group(run(tmp_path, records))


def baseline(variant):
    return next((layer.step.configuration for layer in variant.layers if layer.step.is_baseline), None)


def texts(table):
    return {row[0].text: [value.text for value in row[1:]] for row in table.rows}


def test_each_variant_has_its_own_baseline_and_names(tmp_path):
    faithful, fair = result_of(tmp_path, both()).layers
    assert (faithful.name, fair.name) == ("faithful", "fair")
    assert baseline(faithful).id == BASELINE.cell != baseline(fair).id
    assert {layer.step.configuration.shape for layer in fair.layers} == {"fair"}
    labels = [layer.step.configuration.label for layer in fair.layers]
    assert labels[:2] == ["Transformer Engine FP8", "te-bench FP8"]
    assert "te-bench bf16, causal mask" in {layer.step.configuration.label for layer in faithful.layers}


def test_the_mlp_alone_is_held_against_the_plain_one(tmp_path):
    mlps = layer_records(variant="mlp")
    alone = [dataclasses.replace(one, trial=dataclasses.replace(one.trial, attention="none")) for one in mlps]
    faithful, fair, mlp = result_of(tmp_path, [*both(), *alone]).layers
    assert mlp.name == "mlp"
    assert baseline(mlp).label == "PyTorch eager bf16"
    assert all(layer.step.speedup for layer in mlp.layers)
    assert (baseline(faithful).trial.attention, baseline(fair).trial.attention) == ("manual", "manual")


def test_a_models_layer_is_compared_at_its_own_sizes_alone(tmp_path):
    small = layer_records(model="llama3-8b", ffn=14336, batch=4, sequence=2048)
    large = layer_records(model="llama3-8b", ffn=14336, batch=1, sequence=8192)
    quickstart, *found = result_of(tmp_path, [*layer_records(), *small, *large]).layers
    assert quickstart.name == "fair"
    assert [variant.name for variant in found] == ["llama3-8b 4 x 2048, fair", "llama3-8b 1 x 8192, fair"]
    for variant in found:
        assert len(variant.layers) == len(LAYERS)
        assert all(layer.step.speedup for layer in variant.layers)
        assert all("llama" not in layer.step.configuration.label for layer in variant.layers)


def test_a_layer_with_another_mask_is_marked(tmp_path):
    faithful, fair = tables_of(result_of(tmp_path, both(3)), "layer")
    shown = texts(faithful)
    assert shown["PyTorch eager bf16, written-out attention, full mask (baseline)"][:2] == ["23.4", "1.00×"]
    assert shown["te-bench bf16, causal mask"][1].endswith("] (another mask)")
    assert "another function" in faithful.note
    assert "another" not in fair.note.lower()
    ours = texts(fair)["te-bench FP8"]
    assert ours[1].startswith("1.78× [")
    assert ours[2:] == ["slower", "785.2", "2.50", "2.88", "3/3"]


def test_a_run_of_one_variant_has_its_baseline_too(tmp_path):
    [variant] = result_of(tmp_path, layer_records()).layers  # the group's baseline is of the other one
    assert baseline(variant).label == "PyTorch eager bf16, written-out attention"
    [variant] = result_of(tmp_path / "2", layer_records()[1:]).layers
    assert baseline(variant) is None
    assert variant.comparable


def test_a_layer_that_was_not_measured_stays_in_the_table(tmp_path):
    missing = layer_trial("torchao_rowwise", "cudnn", "rowwise_scaling", "compile")
    reason = "needs torchao: pip install torchao"
    result = result_of(tmp_path, [*layer_records(), record(missing, outcome="unsupported", reason=reason)])
    [table] = tables_of(result, "layer")
    row = texts(table)["torchao FP8, rowwise scaling (unsupported)"]
    assert row[:-1] == ["—"] * (len(table.columns) - 2)
    assert row[-1] == "0/1"
    assert all("torchao_rowwise" not in name for name in texts(tables_of(result, "layer_kinds")[0]))


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("nvjet_sm90_tst_128x256_64x4_1x2_h_bz_coopA_TNT", "GEMM"),
        ("void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<...>>", "GEMM"),
        ("sm90_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n", "GEMM"),
        ("scaled_kernel", "GEMM"),
        ("aten::addmm", "GEMM"),
        ("aten::_scaled_mm", "GEMM"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3", "attention"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<...>", "attention"),
        ("fmha_cutlassB_bf16_aligned_128x128_k128_sm80", "attention"),
        ("void (anonymous namespace)::softmax_warp_forward<...>", "attention"),
        ("_forward_quantized_kernel", "norms, casts"),
        ("_amax_kernel", "norms, casts"),
        ("_line_cast_kernel", "norms, casts"),
        ("_pair_kernel", "norms, casts"),
        ("triton_red_fused__to_copy_native_layer_norm_0", "norms, casts"),
        ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<...>", "norms, casts"),
        ("void at::native::(anonymous namespace)::cuComputePartGradGammaBeta<...>", "norms, casts"),
        ("void transformer_engine::cast_transpose_fused_kernel<...>", "norms, casts"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>", "other"),
        ("Memcpy DtoD (Device -> Device)", "other"),
    ],
)
def test_a_kernel_s_name_tells_its_kind(kernel, kind):
    assert layers.kind_of(kernel) == kind


def test_every_kernel_of_ours_has_a_kind():
    """Each @triton.jit function of te_bench/kernels that is launched, by its name in the source."""
    sources = [path.read_text() for path in (Path(layers.__file__).parents[2] / "kernels").rglob("*.py")]
    names = {name for source in sources for name in re.findall(r"@triton\.jit.*\ndef (\w*_kernel)\(", source)}
    assert {"_pair_kernel", "_cast_kernel", "scaled_kernel"} <= names
    assert {name for name in names if layers.kind_of(name) == layers.OTHER} == set()


def test_kernels_by_kind_are_means_over_processes(tmp_path):
    records = layer_records(2)
    slower = {name: 3 * value for name, value in records[0].work["kernel_s"].items()}
    records[0] = dataclasses.replace(records[0], work={**records[0].work, "kernel_s": slower})
    result = result_of(tmp_path, records)
    [table] = tables_of(result, "layer_kinds")
    titles = [column.title for column in table.columns]
    assert titles[1:7] == ["attention", "GEMM", "norms, casts", "other", "Sum", "Measured"]
    row = texts(table)["PyTorch eager bf16, written-out attention"]
    assert row[:4] == ["2.00", "28.1", "9.36", "4.68"]  # (3 + 1) / 2 times 1, 0.6, 0.2 and 0.1 of 23.4 ms
    assert row[4] == "44.1"
    assert row[6] == "—"  # written-out attention multiplies matrices too
    assert texts(table)["Transformer Engine FP8"][6] == "1,387"


def test_the_longest_kernels_are_those_of_the_fastest_layer_of_each_family(tmp_path):
    [table] = tables_of(result_of(tmp_path, layer_records()), "layer_kernels")
    assert list(texts(table)) == [
        "Transformer Engine FP8",
        "te-bench FP8",
        "torchao FP8",
        "te-bench bf16",
    ]
    first = [value.text for value in table.rows[0]]
    assert first[1:] == ["GEMM", "nvjet_sm90_qqtst_128x256_64x6_2x1_v_bz_TNT", "7.14"]


def test_the_headline_is_of_the_fair_variant_alone(tmp_path):
    directory = run(tmp_path, both(3))
    [sentence] = headlines(load_report([directory]))
    assert sentence.startswith("Fastest layer, fair: Transformer Engine FP8: 11.9 ms")
    shown = summary([directory])
    assert "One transformer layer, faithful (NVIDIA H200)" in shown
    assert max(map(len, shown.splitlines())) <= 100
