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
    Row("product", 12288, 2304, 768, 65.6, 62.9),
    Row("product", 12288, 768, 768, 23.3, 24.5),
    Row("product", 12288, 768, 3072, 76.6, 86.0),
    Row("product", 12288, 50304, 768, 1637.5, 1424.7),
    Row("activated", 12288, 3072, 768, 122.8, 108.8),
    Row("gradient", 12288, 3072, 768, 146.2, 112.3),
    Row("activated", 65536, 3072, 768, 728.1, 611.8),
    Row("gradient", 65536, 3072, 768, 822.1, 620.3),
    Row("product", 12288, 3072, 1024, 121.7, 110.5),
    Row("product", 12288, 50304, 1024, 2123.3, 1881.1),
    Row("activated", 12288, 4096, 1024, 213.0, 178.7),
    Row("gradient", 12288, 4096, 1024, 229.1, 177.4),
    Row("product", 12288, 3840, 1280, 178.6, 163.0),
    Row("product", 12288, 50304, 1280, 2566.1, 2333.6),
    Row("activated", 12288, 5120, 1280, 355.0, 302.2),
    Row("gradient", 12288, 5120, 1280, 370.2, 290.5),
    Row("product", 8192, 4800, 1600, 187.7, 171.2),
    Row("product", 8192, 50304, 1600, 2107.5, 1930.6),
    Row("activated", 8192, 6400, 1600, 304.8, 276.9),
    Row("gradient", 8192, 6400, 1600, 327.3, 267.3),
    Row("product", 8192, 12288, 4096, 1336.9, 1276.9),
    Row("activated", 8192, 16384, 4096, 1881.7, 1698.5),
    Row("gradient", 8192, 16384, 4096, 1939.9, 1707.7),
)
# fmt: on
