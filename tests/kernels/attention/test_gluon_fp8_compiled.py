"""Gluon's FP8 attention as it compiles for Hopper: no spills, no byte of the weights moved, exponentials under products."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import compiled
import pytest
import torch
from compiled import faults
from test_gluon_attention_compiled import BESIDES, LONGEST, check_overlap, count, loops

from te_bench.kernels.attention import _fp8_quantize
from te_bench.kernels.attention import _gluon_fp8_launch as launch
from te_bench.kernels.attention._fp8_quantize import E4M3, Heads
from te_bench.kernels.attention._gluon_fp8_launch import Fp8Plan
from te_bench.kernels.attention._gluon_launch import Plan

SHARED = 227 * 1024
Call = Callable[[], object]


def attend(head_dim: int, *, causal: bool, plan: Fp8Plan | None = None) -> Call:
    def call() -> None:
        launch.processors = lambda device: 132  # type: ignore[assignment]
        q, k = heads(4, head_dim), heads(2, head_dim)
        launch.forward(q, k, k, (1000, 1000), head_dim, torch.bfloat16, causal, 0.125, plan)

    return call


def heads(number: int, head_dim: int) -> Heads:
    padded = _fp8_quantize.padded(1000)
    data = torch.empty(2, number, padded, head_dim, dtype=E4M3)
    return Heads(data, data.view(2, number, head_dim, padded), torch.empty(2, number))


#: Those that a GPU has still to choose among, beside what ships.
PLANS: dict[str, Fp8Plan] = {
    "128, sums in the tensor core": Fp8Plan(Plan(3, 64, 4, 2, 160), False),
    "64, two warpgroups": Fp8Plan(Plan(2, 128, 4, 2, 240, turns=True), True),
}
SPILT = {"128, spilt": Fp8Plan(Plan(2, 128, 3, 2, 240, turns=True), True)}
CALLS: dict[str, Call] = {
    f"{head_dim}{suffix}": attend(head_dim, causal=causal)
    for head_dim in (64, 128)
    for suffix, causal in ((", causal", True), ("", False))
}
CALLS |= {name: attend(int(name.split(",")[0]), causal=False, plan=plan) for name, plan in (PLANS | SPILT).items()}


@pytest.mark.slow
def test_it_compiles_without_faults(pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch) -> None:
    assert pytestconfig.cache is not None
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    *kernels, spilt = compiled.compiled(__name__, list(CALLS), pytestconfig.cache.mkdir("compiled"))
    print(*kernels, spilt, sep="\n")  # pytest -s: the table
    assert [kernel.call for kernel in (*kernels, spilt)] == list(CALLS)
    assert any("bytes spilled" in fault for fault in faults(spilt)), "the gate sees what does not fit"
    assert not [f"{kernel}\n  {fault}" for kernel in kernels for fault in faults(kernel)]
    for kernel in kernels:
        width = int(kernel.call.split(",")[0])
        (tile, _) = PLANS.get(kernel.call) or launch.FORWARD[width]
        assert set(re.findall(r"USETMAXREG\S* .*?(0x\w+)", kernel.sass)) >= {hex(tile.registers), hex(tile.fetching())}
        assert not kernel.count("HGMMA")
        products, elements = (width + tile.at_once) // 32, tile.at_once // 2  # of depth 32; of a thread
        found = [(count(loop, "QGMMA"), count(loop, r"MUFU\.EX2"), len(loop)) for loop in loops(kernel)]
        inside = [
            loop
            for loop, (there, _, length) in zip(loops(kernel), found, strict=True)
            if there == products and length <= LONGEST * elements + BESIDES
        ]
        assert len(inside) == tile.warpgroups, f"{kernel}: products, exponentials and lengths of its loops: {found}"
        for loop in inside:
            assert elements <= count(loop, r"MUFU\.EX2") <= elements + 2, str(kernel)
            assert count(loop, r"\bSHFL") == 4, f"{kernel}: more than the rows' maxima changes its thread"
            assert not count(loop, r"\b(LDL|STL|LDG|STG|LDS|STSM|LDSM)\b"), str(kernel)
            check_overlap(loop, elements)


@pytest.mark.parametrize("width", [64, 128])
def test_a_plan_has_room(width: int) -> None:
    for plan in (launch.FORWARD[width], *(p for name, p in PLANS.items() if name.startswith(str(width)))):
        p = plan.tile
        assert p.at_start() * 128 * (p.warpgroups + 1) <= 65536
        assert p.registers * p.warpgroups + p.fetching() <= p.at_start() * (p.warpgroups + 1)
        held = p.warpgroups * (p.slots * 64 * width + 2 * 64 * width)
        assert held + 2 * p.stages * p.at_once * width + 1024 <= SHARED
        assert p.stages >= 2
        assert _fp8_quantize.PADDED % p.at_once == 0, "a block of keys ends where the padding does"
