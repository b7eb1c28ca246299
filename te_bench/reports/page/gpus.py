"""Make the table of docs/gpus.md: what te-bench runs on which GPU, by the answers of `te-bench doctor --gpu`."""

from collections.abc import Sequence

from te_bench.reports.page.table import Table, filled, word

CPU = "CPU"
HEADS = ("attention, bf16, heads of 64", "attention, bf16, heads of 128")
NORMS = ("norm: layernorm", "norm: rmsnorm", "activation")

#: {row: ((operator with the case, backend), ...)}, as doctor names them; all cases of a row have the same answer.
ROWS: dict[str, tuple[tuple[str, str], ...]] = {
    "attention: flash, PyTorch's": tuple((heads, "flash") for heads in HEADS),
    "attention: triton": tuple((heads, "triton") for heads in HEADS),
    "attention: gluon": tuple((heads, "gluon") for heads in HEADS),
    "attention: triton_fp8": tuple((heads, "triton_fp8") for heads in HEADS),
    "norms, activations: triton": tuple((f"{operator}, bf16", "triton") for operator in NORMS),
    "rotary: triton": (("rotary, bf16", "triton"),),
    "AdamW: triton": (("AdamW", "triton"),),
    "linear cross-entropy: chunked": (("linear cross-entropy", "chunked"),),
    "linear cross-entropy: fp8": (("linear cross-entropy", "fp8"),),
    "casts to FP8, alone and in norms, activations and AdamW: triton": (
        ("quantize to FP8", "triton"), ("AdamW with FP8 copies", "triton"),
        *((f"{operator} into FP8", "triton") for operator in NORMS),
    ),
    "GEMM in bf16: gluon": (("gemm, bf16", "gluon"),),
    "GEMM in FP8: gluon": (("gemm, FP8 by tensor", "gluon"), ("gemm, FP8 by row", "gluon")),
    "GEMM in FP8: triton": (("gemm, FP8 by tensor", "triton"), ("gemm, FP8 by row", "triton")),
    "GEMM in FP8: scaled_mm, cuBLASLt's": (("gemm, FP8 by tensor", "scaled_mm"), ("gemm, FP8 by row", "scaled_mm")),
    "GEMM in FP8 by blocks: triton": (("gemm, FP8 by block", "triton"),),
    "GEMM in FP8 by blocks: scaled_mm, cuBLASLt's": (("gemm, FP8 by block", "scaled_mm"),),
    "GEMM in MXFP8, NVFP4: block_scaled": tuple((f"gemm, {name}", "block_scaled") for name in ("MXFP8", "NVFP4")),
    "recipes: delayed_scaling, float8_current_scaling": tuple(
        ("FP8 recipe", name) for name in ("delayed_scaling", "float8_current_scaling")
    ),
    "recipe: rowwise_scaling": (("FP8 recipe", "rowwise_scaling"),),
    "recipe: float8_block_scaling": (("FP8 recipe", "float8_block_scaling"),),
    "recipe: float8_current_scaling_dpa": (("FP8 recipe", "float8_current_scaling_dpa"),),
    "recipes: delayed_scaling_e4m3, float8_current_scaling_e4m3": tuple(
        ("FP8 recipe", name) for name in ("delayed_scaling_e4m3", "float8_current_scaling_e4m3")
    ),
    "recipes: current and row-wise scaling with a part in bf16": tuple(
        ("FP8 recipe", name)
        for name in (
            *(f"float8_current_scaling_bf16_{part}" for part in ("end", "first", "wgrad")),
            "rowwise_scaling_bf16_wgrad",
        )
    ),
    "recipes: mxfp8_block_scaling, nvfp4_block_scaling": tuple(
        ("FP8 recipe", name) for name in ("mxfp8_block_scaling", "nvfp4_block_scaling", "nvfp4_block_scaling_bf16_end")
    ),
}  # fmt: skip


def table() -> Table:
    """Return a row for each backend, a column for all GPUs with the same answers; doctor alone gives the reasons."""
    from te_bench.experiments import gpu_support
    from te_bench.kernels.architecture import GPUS

    columns: dict[tuple[str, ...], list[str]] = {}
    for name, gpu in GPUS.items():
        columns.setdefault(_answers(gpu_support.rows(gpu.machine, gpu.capability, users_own=False)), []).append(name)
    columns[_answers(gpu_support.rows(CPU, None))] = [CPU]
    found = [(", ".join(names), answers) for answers, names in columns.items()]
    rows = [
        {"Operator: backend": word(row), **{names: word(answers[at]) for names, answers in found}}
        for at, row in enumerate(ROWS)
    ]
    return filled("gpus", "What runs where", rows, text_columns=len(rows[0]))


def _answers(said: Sequence[tuple[str, str, str]]) -> tuple[str, ...]:
    """Return the answer of each row, without the reason."""
    by_question = {(operator, backend): answer.partition(":")[0] for operator, backend, answer in said}
    found = []
    for row, questions in ROWS.items():
        answers = {by_question[question] for question in questions}
        assert len(answers) == 1, f"{row}: {answers}"
        found.append(answers.pop())
    return tuple(found)
