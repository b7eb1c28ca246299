"""Gluon's FP8 attention as it compiles for Hopper: no spills, FP8 products alone, no byte of the weights moved."""

import itertools
import re
from collections.abc import Callable
from pathlib import Path

import compiled
import pytest
import torch
from compiled import Compiled, count, faults, loops

from te_bench.kernels import architecture
from te_bench.kernels.attention import fp8_quantize
from te_bench.kernels.attention.fp8_quantize import E4M3, Heads
from te_bench.kernels.attention.hopper import fp8_launch as launch
from te_bench.kernels.attention.hopper.launch import Tiling

D = 128
LONGEST = 460  # instructions for a block of 64 rows and 128 keys
#: The same of the backward kernel's blocks of 64 rows and 64 keys, and of those that may be partly hidden.
LONGEST_BACKWARD, LONGEST_MASKED = 450, 520
#: Bytes spilled at most by whichever Triton, of a tile's numbers, and of those of edges and of shared heads: the loops over
#: blocks take every register, and touch no memory.
OF_A_TILE, OF_MORE = 64, 512
#: A block's instructions: what is waited for, told and multiplied when.
ORDER = (
    "sync see qk+dp:8 wait see dv:4 wait sync tell "  # S and dP, which leave the place of FP8's rows; dV runs on
    "sync put:4 fence sync tell sync see dq:8 dv:4 wait add:8 "  # dS; dQ leaves under dK's product, dv here
    "wait sync tell"  # nothing is in flight
)
PATTERNS = {
    "qk+dp": r"QGMMA", "dq": r"HGMMA\.64x64x16", "dv": r"HGMMA\.64x128x16", "wait": r"WARPGROUP\.DEPBAR",
    "put": r"\bSTSM", "fence": r"FENCE\.VIEW\.ASYNC", "sync": r"BAR\.SYNC", "tell": r"SYNCS\.ARRIVE",
    "see": r"SYNCS\.PHASECHK", "add": r"REDG\.E\.ADD\.F32x4",
}  # fmt: skip
Call = Callable[[], object]

#: One worker asks for them all, of one child process.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("compiled-gluon-fp8")]


def attend(*, causal: bool, rows: int = 1024, dtype: torch.dtype = torch.bfloat16) -> Call:
    def call() -> None:
        architecture.processors = lambda device: 132  # type: ignore[assignment]
        q, k = heads(4, rows), heads(2, rows)
        out = torch.empty(2, rows, 4, D, dtype=dtype).transpose(1, 2)
        launch.forward(out, torch.empty(2, 4, rows), (q, k, k), rows, causal, 0.125)

    return call


def heads(number: int, rows: int) -> Heads:
    padded = fp8_quantize.padded(rows)
    data = torch.empty(2, number, padded, D, dtype=E4M3)
    return Heads(data, data.view(2, number, -1, D, 128), torch.empty(2, number))


def gradients(
    *, causal: bool, rows: int = 1024, keys: int | None = None, dtype: torch.dtype = torch.bfloat16, groups: int = 4,
    plan: Tiling | None = None,
) -> Call:  # fmt: skip
    """The casts of dO are test_triton_fp8_compiled's."""

    def call() -> None:
        architecture.processors = lambda device: 132  # type: ignore[assignment]
        q8, k8 = heads(4, rows), heads(groups, keys or rows)
        info = torch.empty(2, 2, 4, fp8_quantize.padded(rows))
        launch.quantize_dout = lambda *_: (q8, info)  # type: ignore[assignment]
        q, k = torch.empty(2, 4, rows, D, dtype=dtype), torch.empty(2, groups, keys or rows, D, dtype=dtype)
        launch.backward((q, k, k), q, q, k, q, info[0], (q8, k8, k8), causal, 0.125, plan)

    return call


#: An output's format changes but its rounding; parts of blocks come on top of whole ones.
FORWARD: dict[str, Call] = {
    "causal": attend(causal=True),
    "full, 1000 rows, fp16": attend(causal=False, rows=1000, dtype=torch.float16),
}
BACKWARD: dict[str, Call] = {
    "backward, causal": gradients(causal=True),
    "backward, causal, shared heads": gradients(causal=True, groups=1),
    "backward, causal, 1000 rows, fp16": gradients(causal=True, rows=1000, dtype=torch.float16),
    "backward, full": gradients(causal=False),
    "backward, full, shared heads": gradients(causal=False, groups=1),
    "backward, full, 1000 keys": gradients(causal=False, keys=1000),
    "backward, full, spilt": gradients(causal=False, plan=launch.BACKWARD[False]._replace(registers=216)),
}
CALLS = FORWARD | BACKWARD


def made(calls: dict[str, Call], folder: Path) -> list[Compiled]:
    wanted = [kernel for kernel in compiled.compiled(__name__, tuple(CALLS), folder) if kernel.call in calls]
    print(*wanted, sep="\n")  # pytest -s: the table
    return wanted


def test_it_compiles_without_faults(folder: Path) -> None:
    kernels = made(FORWARD, folder)
    assert [kernel.call for kernel in kernels] == list(FORWARD)
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


def complaints(kernel: Compiled) -> list[str]:
    """What a backward kernel may not have."""
    case = kernel.call.removeprefix("backward, ")
    edge = "causal" in case or "1000 keys" in case
    found = faults(kernel, OF_MORE if edge or "shared heads" in case else OF_A_TILE)
    inside = [
        x for x in loops(kernel) if (count(x, "QGMMA"), count(x, "HGMMA")) == (8, 16) and len(x) <= LONGEST_MASKED
    ]
    inside.sort(key=len)
    if len(inside) != (4 if edge else 2) or len(inside[1]) > LONGEST_BACKWARD:
        found.append(f"loops over blocks, a warpgroup's for each: {list(map(len, inside))} instructions")
    for loop in inside:
        if count(loop, r"MUFU\.EX2") != 32 or count(loop, r"\bREDG") != 8:
            found.append("exponentials or additions to dQ are others than the block's numbers")
        if memory := count(loop, r"\b(LDL|STL|LDG|STG|SHFL)\b"):
            found.append(f"{memory} times to memory, or between threads, for a block")
        waits = [int(x, 16) for line in loop for x in re.findall(r"DEPBAR.*gsb0, (0x\d)", line)]
        order = [name for line in loop for name, pattern in PATTERNS.items() if re.search(pattern, line)]
        runs = [(name, len(list(run))) for name, run in itertools.groupby(order)]
        in_words = " ".join(f"{name}:{n}" if n > 1 else name for name, n in runs)
        if waits != [1, 1, 1, 0] or in_words != ORDER:
            found.append(f"order: {in_words}, with {waits} products under way after a wait")
        first, dv = (next(i for i, x in enumerate(loop) if re.search(PATTERNS[name], x)) for name in ("wait", "dv"))
        if count(loop[first:dv], r"MUFU\.EX2") != 32:
            found.append("exponentials elsewhere than under dP's product")
    return found


def test_the_backward_kernel_keeps_its_products_in_flight(folder: Path) -> None:
    kernels = [kernel for kernel in made(BACKWARD, folder) if "gluon" in kernel.kernel]
    *kernels, spilt = kernels
    assert [kernel.call for kernel in (*kernels, spilt)] == list(BACKWARD)
    seen = "\n".join(complaints(spilt))
    for what in ("C7512", "bytes spilled", "to memory", "order: "):
        assert what in seen, "the gate sees what does not fit"
    for kernel in kernels:
        assert not complaints(kernel), "\n".join([str(kernel), *complaints(kernel)])
        p = launch.BACKWARD["causal" in kernel.call]
        assert set(re.findall(r"USETMAXREG\S* .*?(0x\w+)", kernel.sass)) >= {hex(p.registers), hex(p.fetching())}
        assert kernel.count(r"\bUTMALDG"), str(kernel)
        assert kernel.count(r"\bUTMASTG"), str(kernel)
