"""Measures the GEMMs in bf16 of _half's table, by turns, and prints te_bench/kernels/gemm/half_measured.py anew.

    python benchmarks/gemm_half.py > measured.py && mv measured.py te_bench/kernels/gemm/half_measured.py

On an NVIDIA GPU that Gluon's kernels run on; half a minute. More shapes: add rows there, with any figures.
"""

import sys

import torch
from _race import Calls, here, measured_table, race

from te_bench.kernels import activation
from te_bench.kernels.gemm import half, half_measured
from te_bench.kernels.gemm.half_measured import Row

ROUNDS = 12


def operands(m: int, n: int, k: int, across: bool, device: str = "cuda") -> tuple[torch.Tensor, torch.Tensor]:
    """Normal data, for a tensor core's power and clock depend on them."""
    a = torch.randn(m, k, device=device, dtype=torch.bfloat16)
    return a, torch.randn(*((k, n) if across else (n, k)), device=device, dtype=torch.bfloat16) / k**0.5


def calls(role: str, m: int, n: int, k: int) -> Calls:
    f, kind = activation.load("triton"), "gelu_erf"
    a, b = operands(m, n, k, role == half.GRADIENT)
    if role == half.PRODUCT:
        return {"apart": lambda: a @ b.t(), "gluon": lambda: half._product(a, b, None, None)}
    if role == half.ACTIVATED:
        return {"apart": lambda: f.forward(a @ b.t(), kind), "gluon": lambda: half.activated(a, b, None, kind)}
    h = torch.randn(m, n, device="cuda", dtype=torch.bfloat16)
    return {"apart": lambda: f.backward(a @ b, h, kind), "gluon": lambda: half.gradient(a, b, h, kind)}


def measured(row: Row) -> Row:
    """The row with this GPU's figures."""
    found = race(lambda: calls(*row[:4]), ROUNDS)
    made = Row(*row[:4], *(round(1e6 * found[name], 1) for name in ("apart", "gluon")))
    print(made, file=sys.stderr, flush=True)
    return made


def source(rows: list[Row], gpu: str, versions: str) -> str:
    """_half_measured.py with these rows, all above them as it is."""
    lines = [f'    Row("{r.role}", {r.m}, {r.n}, {r.k}, {r.apart}, {r.gluon}),' for r in rows]
    return measured_table(half_measured, lines, gpu, versions)


def main() -> None:
    torch.manual_seed(0)
    rows = [measured(row) for row in half_measured.ROWS]
    print(source(rows, *here()), end="")


if __name__ == "__main__":
    main()
