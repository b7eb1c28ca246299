"""FP8 GEMMs as measured, of which the policy chooses. Written by benchmarks/gemm_policy.py on the GPU that it names.

D (M, N) in bf16 of E4M3 operands, TFLOP/s, medians of calls by turns, each in a captured graph with the L2 flushed before.
"""

from typing import NamedTuple


class Row(NamedTuple):
    m: int
    n: int
    k: int
    granularity: str  # of both operands' scales
    fast: bool  # the tensor core's 14-bit sums; else promoted every 128 of K
    tflops: dict[str, int]  # by backend


GPU = "NVIDIA H200"
MEASURED = "2026-11-21, torch 2.11.0+cu130, Triton 3.6.0"
# fmt: off
ROWS = (
    Row(12288, 2304, 768, "tensor", True, {"scaled_mm": 853, "triton": 888, "gluon": 1027}),
    Row(12288, 768, 768, "tensor", True, {"scaled_mm": 711, "triton": 645, "gluon": 737}),
    Row(12288, 3072, 768, "tensor", True, {"scaled_mm": 873, "triton": 922, "gluon": 1083}),
    Row(12288, 768, 3072, "tensor", True, {"scaled_mm": 1159, "triton": 997, "gluon": 1095}),
    Row(12288, 50304, 768, "tensor", True, {"scaled_mm": 971, "triton": 941, "gluon": 1164}),
    Row(8192, 8192, 8192, "tensor", True, {"scaled_mm": 1250, "triton": 1283, "gluon": 1321}),
    Row(8192, 12288, 4096, "tensor", True, {"scaled_mm": 1213, "triton": 1209, "gluon": 1300}),
    Row(8192, 4096, 4096, "tensor", True, {"scaled_mm": 1224, "triton": 1228, "gluon": 1262}),
    Row(8192, 16384, 4096, "tensor", True, {"scaled_mm": 1134, "triton": 1165, "gluon": 1253}),
    Row(8192, 4096, 16384, "tensor", True, {"scaled_mm": 1257, "triton": 1255, "gluon": 1267}),
    Row(12288, 2304, 768, "row", True, {"scaled_mm": 897, "triton": 917, "gluon": 960}),
    Row(12288, 768, 768, "row", True, {"scaled_mm": 604, "triton": 577, "gluon": 670}),
    Row(12288, 3072, 768, "row", True, {"scaled_mm": 903, "triton": 925, "gluon": 982}),
    Row(12288, 768, 3072, "row", True, {"scaled_mm": 1103, "triton": 956, "gluon": 1089}),
    Row(12288, 50304, 768, "row", True, {"scaled_mm": 1002, "triton": 949, "gluon": 1050}),
    Row(8192, 8192, 8192, "row", True, {"scaled_mm": 1334, "triton": 1275, "gluon": 1319}),
    Row(12288, 2304, 768, "tensor", False, {"scaled_mm": 857, "triton": 686, "gluon": 910}),
    Row(12288, 768, 768, "tensor", False, {"scaled_mm": 589, "triton": 537, "gluon": 577}),
    Row(12288, 3072, 768, "tensor", False, {"scaled_mm": 961, "triton": 740, "gluon": 989}),
    Row(12288, 768, 3072, "tensor", False, {"scaled_mm": 1080, "triton": 743, "gluon": 906}),
    Row(12288, 50304, 768, "tensor", False, {"scaled_mm": 1003, "triton": 728, "gluon": 1061}),
    Row(8192, 8192, 8192, "tensor", False, {"scaled_mm": 1411, "triton": 819, "gluon": 1335}),
    Row(12288, 768, 2304, "tensor", False, {"scaled_mm": 988, "triton": 716, "gluon": 860}),
    Row(12288, 768, 50304, "tensor", False, {"scaled_mm": 1355, "triton": 778, "gluon": 1037}),
)
# fmt: on
