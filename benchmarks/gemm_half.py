"""Measures the GEMMs in bf16 of _half's table, by turns, and prints te_bench/kernels/gemm/_half_measured.py anew.

    python benchmarks/gemm_half.py > measured.py && mv measured.py te_bench/kernels/gemm/_half_measured.py

On an NVIDIA GPU that Gluon's kernels run on; half a minute. More shapes: add rows there, with any figures.
"""

import datetime
import sys
from pathlib import Path

import torch
import triton
from _race import Calls, race

from te_bench.kernels import activation
from te_bench.kernels.gemm import _half, _half_measured
from te_bench.kernels.gemm._half_measured import Row

ROUNDS = 12


def operands(m: int, n: int, k: int, across: bool, device: str = "cuda") -> tuple[torch.Tensor, torch.Tensor]:
    """Normal data, for a tensor core's power and clock depend on them."""
    a = torch.randn(m, k, device=device, dtype=torch.bfloat16)
    return a, torch.randn(*((k, n) if across else (n, k)), device=device, dtype=torch.bfloat16) / k**0.5


def calls(role: str, m: int, n: int, k: int) -> Calls:
    f, kind = activation.load("triton"), "gelu_erf"
    a, b = operands(m, n, k, role == _half.GRADIENT)
    if role == _half.PRODUCT:
        return {"apart": lambda: a @ b.t(), "gluon": lambda: _half._product(a, b, None, None)}
    if role == _half.ACTIVATED:
        return {"apart": lambda: f.forward(a @ b.t(), kind), "gluon": lambda: _half.activated(a, b, None, kind)}
    h = torch.randn(m, n, device="cuda", dtype=torch.bfloat16)
    return {"apart": lambda: f.backward(a @ b, h, kind), "gluon": lambda: _half.gradient(a, b, h, kind)}


def measured(row: Row) -> Row:
    """The row with this GPU's figures."""
    found = race(lambda: calls(*row[:4]), ROUNDS)
    made = Row(*row[:4], *(round(1e6 * found[name], 1) for name in ("apart", "gluon")))
    print(made, file=sys.stderr, flush=True)
    return made


def source(rows: list[Row], gpu: str, versions: str) -> str:
    """_half_measured.py with these rows, all above them as it is."""
    head = Path(_half_measured.__file__).read_text(encoding="utf-8").split("\nGPU = ")[0]
    lines = [f'    Row("{r.role}", {r.m}, {r.n}, {r.k}, {r.apart}, {r.gluon}),' for r in rows]
    told = [f'GPU = "{gpu}"', f'MEASURED = "{versions}"', "# fmt: off", "ROWS = (", *lines, ")", "# fmt: on", ""]
    return head + "\n" + "\n".join(told)


def main() -> None:
    torch.manual_seed(0)
    today = datetime.datetime.now(datetime.UTC).date()
    versions = f"{today}, torch {torch.__version__}, Triton {triton.__version__}"
    rows = [measured(row) for row in _half_measured.ROWS]
    print(source(rows, torch.cuda.get_device_name(), versions), end="")


if __name__ == "__main__":
    main()
