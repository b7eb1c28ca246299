"""GEMMs in bf16 as measured, of which _half chooses. Written by benchmarks/gemm_half.py on the GPU that it names.

Microseconds, medians of calls by turns, ten to a captured graph: by cuBLASLt, with the activation's kernel where there is
one, and by the Gluon GEMM with the activation in its epilogue.
"""

from typing import NamedTuple


class Row(NamedTuple):
    role: str  # product, activated, gradient
    m: int
    n: int
    k: int
    apart: float  # cuBLASLt and a kernel
    gluon: float


GPU = "NVIDIA H200"
MEASURED = "2026-11-23, torch 2.11.0+cu130, Triton 3.6.0"
# fmt: off
ROWS = (
    Row("product", 12288, 2304, 768, 74.0, 66.7),
    Row("product", 12288, 768, 768, 27.0, 28.3),
    Row("product", 12288, 768, 3072, 84.3, 94.2),
    Row("product", 12288, 50304, 768, 1610.0, 1430.2),
    Row("activated", 12288, 3072, 768, 135.9, 114.4),
    Row("gradient", 12288, 3072, 768, 160.8, 121.7),
    Row("activated", 65536, 3072, 768, 748.7, 627.8),
    Row("gradient", 65536, 3072, 768, 866.8, 655.2),
    Row("product", 12288, 3072, 1024, 0.0, 1.0),
    Row("product", 12288, 50304, 1024, 0.0, 1.0),
    Row("activated", 12288, 4096, 1024, 226.4, 198.7),
    Row("gradient", 12288, 4096, 1024, 253.3, 197.3),
    Row("product", 12288, 3840, 1280, 0.0, 1.0),
    Row("product", 12288, 50304, 1280, 0.0, 1.0),
    Row("activated", 12288, 5120, 1280, 336.6, 302.1),
    Row("gradient", 12288, 5120, 1280, 369.3, 285.4),
    Row("product", 8192, 4800, 1600, 0.0, 1.0),
    Row("product", 8192, 50304, 1600, 0.0, 1.0),
    Row("activated", 8192, 6400, 1600, 331.6, 302.8),
    Row("gradient", 8192, 6400, 1600, 356.8, 291.7),
    Row("product", 8192, 12288, 4096, 0.0, 1.0),
    Row("activated", 8192, 16384, 4096, 1841.7, 1778.2),
    Row("gradient", 8192, 16384, 4096, 1954.8, 1743.9),
)
# fmt: on
