"""Gluon's attention as it compiles for Hopper, without one: no serialised tensor cores, exponentials under products.

No spills either, but for numbers of a tile, which its loops over blocks do not look at.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import compiled
import pytest
import torch
from compiled import Compiled, count, faults, loops

from te_bench.kernels import architecture
from te_bench.kernels.attention.hopper import launch
from te_bench.kernels.attention.hopper.launch import Tiling

BF16 = torch.bfloat16
OF_A_TILE = 64  # bytes spilled
OF_A_FUSED_TILE = 400  # there the loop over blocks takes all registers, so that what deals tiles waits in memory
LONGEST, BESIDES = 6, 140  # instructions for an element, and for a block
#: For a block of the fused kernel, and for one that may be partly hidden; by the width.
LONGEST_FUSED, LONGEST_MASKED = {64: 620, 128: 510}, {64: 760, 128: 530}
Call = Callable[[], object]

#: One worker asks for them all, of one child process.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("compiled-gluon-attention")]


def on_an_h200(
    head_dim: int, call: Callable[..., Any], *given: Any, groups: int = 4, causal: bool = True, keys: int = 1000
) -> Call:
    """What is compiled depends on no length, but for the plan, which goes by the keys."""

    def there() -> None:
        architecture.processors = lambda device: 132  # type: ignore[assignment]
        q = torch.empty(2, 4, 1000, head_dim, dtype=BF16)
        k = torch.empty(2, groups, keys, head_dim, dtype=BF16)
        call(q, k, causal, *given)

    return there


def forward(q: torch.Tensor, k: torch.Tensor, causal: bool) -> None:
    launch.forward(q, k, k, causal, 0.125)


def backward(
    q: torch.Tensor, k: torch.Tensor, causal: bool, fused: Tiling | None = None, deterministic: bool = False
) -> None:
    launch.backward(q, q, k, k, q, torch.empty(q.shape[:3]), causal, 0.125, deterministic, fused)


CALLS: dict[str, Call] = {
    f"{name} {head_dim}{suffix}": on_an_h200(head_dim, call, **options)
    for name, call in (("forward", forward), ("backward", backward))
    for head_dim in (64, 128)
    for suffix, options in (("", {}), (", full", {"causal": False}))
}
# Of a tile that is causal all instructions but the plan of its blocks are those of a full one, whose last keys are hidden.
del CALLS["forward 64, full"], CALLS["backward 128, full"]
CALLS["backward 64, long"] = on_an_h200(64, backward, None, True, keys=launch.LONG)
CALLS["backward 64, shared heads"] = on_an_h200(64, backward, groups=1)
FUSED: dict[str, Call] = {
    "fused 64": on_an_h200(64, backward, launch.FUSED[64, True]),
    "fused 128": on_an_h200(128, backward, launch.FUSED[128, True]),
    "fused 128, full": on_an_h200(128, backward, launch.FUSED[128, False], causal=False, keys=1024),
    "fused 128, shared heads": on_an_h200(128, backward, launch.FUSED[128, True], groups=1),
}
CALLS |= FUSED


def made(names: list[str], folder: Path) -> list[Compiled]:
    return [kernel for kernel in compiled.compiled(__name__, tuple(CALLS), folder) if kernel.call in names]


def test_it_compiles_without_faults(folder: Path) -> None:
    kernels = made([name for name in CALLS if name not in FUSED], folder)
    print(*kernels, sep="\n")  # pytest -s: the table
    assert len(kernels) == 3 + 2 * 5
    found = [f"{kernel}\n  {fault}" for kernel in kernels for fault in faults(kernel, OF_A_TILE)]
    assert not found, "\n".join(found)
    for kernel in kernels:
        plan, products, elements = expected(kernel)
        assert set(re.findall(r"USETMAXREG\S* .*?(0x\w+)", kernel.sass)) >= {hex(plan.registers), hex(plan.fetching())}
        assert kernel.count(r"\bUTMALDG"), str(kernel)
        assert kernel.count(r"\bUTMASTG"), str(kernel)
        found_loops = [(count(loop, "HGMMA"), len(loop)) for loop in loops(kernel)]
        inside = [
            loop
            for loop in loops(kernel)
            if count(loop, "HGMMA") == products and len(loop) <= LONGEST * elements + BESIDES
        ]
        assert len(inside) == plan.warpgroups, f"{kernel}: {products} products of {elements} elements in {found_loops}"
        for loop in inside:
            assert elements <= count(loop, r"MUFU\.EX2") <= elements + 2, str(kernel)
            assert not count(loop, r"\b(LDL|STL|LDG|STG)\b"), str(kernel)
            assert count(loop, r"\bMOV\b") <= 4, f"{kernel}: operands are copied"
            if plan.overlap and "forward" in kernel.kernel:
                check_overlap(loop, elements)


def expected(kernel: Compiled) -> tuple[Tiling, int, int]:
    """The plan, and of its loop over blocks the products and a thread's elements."""
    head_dim = int(re.findall(r"\d+", kernel.call)[0])
    name = next(name for name in ("forward", "rows", "keys") if name in kernel.kernel)
    if name == "forward":
        plan = launch.FORWARD[head_dim]
    else:
        plan = launch.OF_ROWS[head_dim, "long" in kernel.call] if name == "rows" else launch.OF_KEYS[head_dim]
    # Of depth 16: scores and dP have the heads' width, the others that of the block.
    wide, deep = {"forward": (1, 1), "rows": (2, 1), "keys": (2, 2)}[name]
    return plan, wide * head_dim // 16 + deep * plan.at_once // 16, plan.at_once // 2


def check_overlap(loop: list[str], elements: int) -> None:
    """The exponentials come between the wait for the scores and that for the product of weights and values."""
    waits = [(at, line) for at, line in enumerate(loop) if "WARPGROUP.DEPBAR" in line]
    (first, one), (second, none) = waits
    assert "gsb0, 0x1" in one
    assert "gsb0, 0x0" in none
    assert count(loop[first:second], r"MUFU\.EX2") >= elements


def test_the_fused_backward_kernel_keeps_its_products_in_flight(folder: Path) -> None:
    kernels = made(list(FUSED), folder)
    print(*kernels, sep="\n")
    assert len(kernels) == 3 * len(FUSED)
    for kernel in kernels:
        found = [fault for fault in faults(kernel) if "spilled" not in fault]
        assert not found, f"{kernel}\n  {found}"
        if "fused" not in kernel.kernel:
            assert not kernel.spills, str(kernel)
            assert re.search(r"st\.global.*\.v4\.b32", kernel.ptx), f"{kernel}: 16 bytes at a time"
            continue
        assert kernel.spills <= OF_A_FUSED_TILE, str(kernel)
        assert set(re.findall(r"USETMAXREG\S* .*?(0x\w+)", kernel.sass)) >= {hex(240), hex(24)}
        assert kernel.count(r"\bUTMALDG"), str(kernel)
        assert kernel.count(r"\bUTMASTG"), str(kernel)
        found_loops = [(count(loop, "HGMMA"), len(loop)) for loop in loops(kernel)]
        width = int(re.findall(r"\d+", kernel.call)[0])
        plan = launch.FUSED[width, "full" not in kernel.call]
        inside = [loop for loop in loops(kernel) if count(loop, "HGMMA") == 32 and len(loop) <= LONGEST_MASKED[width]]
        inside.sort(key=len)
        assert len(inside) == (2 if "full" in kernel.call else 4), f"{kernel}: {found_loops}"
        assert len(inside[1]) <= LONGEST_FUSED[width], f"{kernel}: {found_loops}"
        for i, loop in enumerate(inside):
            check_order(loop, kernel, plan, width, spilled=0 if i < 2 else 4)  # the longer ones: two blocks of a tile


def check_order(loop: list[str], kernel: Compiled, plan: Tiling, width: int, *, spilled: int) -> None:
    """Of a block: what runs under which product, and that dS is told of after it is there for the tensor core to read.

    "shared" are products whose left operand is in shared memory (scores, dP and dQ), "held" those of dV and dK. spilled: how
    many numbers may wait in memory.
    """
    patterns = {
        "shared": r"HGMMA\S+ R\d+, gdesc", "held": r"HGMMA\S+ R\d+, R\d+, gdesc", "wait": r"WARPGROUP\.DEPBAR",
        "exp": r"MUFU\.EX2", "put": r"\bSTSM", "line": r"\bSTS\.128", "fence": r"FENCE\.VIEW\.ASYNC",
        "meet": r"BAR\.SYNC\S* 0x8, 0x100", "sync": r"BAR\.SYNC", "tell": r"SYNCS\.ARRIVE",
        "add": r"\bREDG\.E\.ADD\.F32x4|\bUTMAREDG\.3D\.ADD", "see": r"SYNCS\.PHASECHK", "spilled": r"\b(LDL|STL)\b",
    }  # fmt: skip
    order = [next((name for name, pattern in patterns.items() if re.search(pattern, line)), "") for line in loop]
    waits = [int(x, 16) for line in loop for x in re.findall(r"DEPBAR.*gsb0, (0x\d)", line)]
    assert waits == [1, 1, 1, 0], f"{kernel}: waits with {waits} products under way"
    rows, scores = plan.at_once // 16, width // 16  # instructions of depth 16
    counts = {"shared": 2 * scores + 8, "held": 2 * rows, "exp": 8 * rows, "put": rows, "add": 1 if plan.ahead else 8}
    assert {name: order.count(name) for name in counts} == counts, str(kernel)
    assert order.count("spilled") <= spilled, str(kernel)
    first, second, third, last = [i for i, name in enumerate(order) if name == "wait"]
    if plan.ahead:
        before, given, leaving = order[:first], order[first:second], order[third:last]
        assert [before.count(name) for name in ("shared", "held", "exp")] == [scores, rows, 8 * rows], (
            "all under dP's product"
        )
        assert given.index("held") < given.index("put"), "dK's product runs while dS meets"
        assert given.index("put") < given.index("fence") < given.index("meet") < given.index("shared")
        assert order[second:third].count("shared") == scores, "the next scores begin before dQ is there"
        assert leaving.count("line") == 8, "and dQ leaves under them: 16 bytes at a time"
        assert leaving.index("line") < leaving.index("fence") < leaving.index("add")
        assert "sync" in leaving[leaving.index("fence") : leaving.index("add")], "one thread tells TMA for all"
    else:
        assert order[:first].count("shared") == 2 * scores, "scores and dP are both under way"
        assert set(order[first:second]) >= {"exp", "held"}
        assert not {"exp"} & set(order[second:]), "exponentials under dP's product"
        given = order[second:third]
        assert (
            given.index("put") < given.index("fence") < given.index("tell") < given.index("see") < given.index("shared")
        )
        assert "sync" in given[given.index("fence") : given.index("tell")], (
            "one thread tells for all, so all are awaited"
        )
        assert given.index("shared") < given.index("held"), "dQ before dK"
        assert order[third:last].count("add") == 8, "dQ leaves under dK's product"
