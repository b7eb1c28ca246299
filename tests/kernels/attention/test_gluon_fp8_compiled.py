"""Gluon's FP8 attention as it compiles for Hopper: no spills, FP8 products alone, no byte of the weights moved."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import compiled
import pytest
import torch
from compiled import faults
from test_gluon_attention_compiled import count, loops

from te_bench.kernels.attention import _fp8_quantize
from te_bench.kernels.attention import _gluon_fp8_launch as launch
from te_bench.kernels.attention._fp8_quantize import E4M3, Heads
from te_bench.kernels.attention._gluon_launch import Plan

D = 128
LONGEST = 460  # instructions for a block of 64 rows and 128 keys
Call = Callable[[], object]


def attend(*, causal: bool, rows: int = 1024, dtype: torch.dtype = torch.bfloat16, plan: Plan | None = None) -> Call:
    def call() -> None:
        launch.processors = lambda device: 132  # type: ignore[assignment]
        q, k = heads(4, rows), heads(2, rows)
        launch.forward(q, k, k, (rows, rows), D, dtype, causal, 0.125, plan)

    return call


def heads(number: int, rows: int) -> Heads:
    padded = _fp8_quantize.padded(rows)
    data = torch.empty(2, number, padded, D, dtype=E4M3)
    return Heads(data, data.view(2, number, -1, D, 128), torch.empty(2, number))


CALLS: dict[str, Call] = {
    "causal": attend(causal=True),
    "causal, fp16": attend(causal=True, dtype=torch.float16),
    "full": attend(causal=False),
    "full, 1000 rows": attend(causal=False, rows=1000),
    "spilt": attend(causal=True, plan=launch.FORWARD._replace(registers=152)),
}


@pytest.mark.slow
def test_it_compiles_without_faults(pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch) -> None:
    assert pytestconfig.cache is not None
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    *kernels, spilt = compiled.compiled(__name__, list(CALLS), pytestconfig.cache.mkdir("compiled"))
    print(*kernels, spilt, sep="\n")  # pytest -s: the table
    assert [kernel.call for kernel in (*kernels, spilt)] == list(CALLS)
    assert any("bytes spilled" in fault for fault in faults(spilt)), "the gate sees what does not fit"
    assert not [f"{kernel}\n  {fault}" for kernel in kernels for fault in faults(kernel)]
    p = launch.FORWARD
    products, elements = (D + 2 * p.at_once) // 32, p.at_once // 2  # of depth 32, of half of the features; of a thread
    for kernel in kernels:
        assert set(re.findall(r"USETMAXREG\S* .*?(0x\w+)", kernel.sass)) >= {hex(p.registers), hex(p.fetching())}
        assert not kernel.count("HGMMA"), str(kernel)
        assert kernel.count(r"\bUTMALDG"), str(kernel)
        assert kernel.count(r"\bUTMASTG"), str(kernel)
        found = [(count(loop, "QGMMA"), len(loop)) for loop in loops(kernel)]
        inside = [loop for loop in loops(kernel) if count(loop, "QGMMA") == products and len(loop) <= LONGEST]
        assert len(inside) == p.warpgroups, f"{kernel}: products and lengths of its loops: {found}"
        for loop in inside:
            assert elements <= count(loop, r"MUFU\.EX2") <= elements + 2, str(kernel)
            assert count(loop, r"\bSHFL") == 4, f"{kernel}: more than the rows' maxima changes its thread"
            assert not count(loop, r"\b(LDL|STL|LDG|STG|LDS|STSM|LDSM|STS)\b"), str(kernel)
