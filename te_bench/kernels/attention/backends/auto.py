"""The backend that was measured to be the fastest for the problem on this machine, whatever the mask.

It takes the nearest row of measured times (the user's own, from `te-bench tune attention`, before the shipped ones),
and there the fastest backend that can do the problem, forward and backward together. If no row is near, it takes the
first of `preference` that can. Within a process, one problem always goes to one backend.
"""

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from te_bench.kernels import compiler, measured
from te_bench.kernels.attention import (
    AUTO,
    Backend,
    Problem,
    attend,
    in_fp8,
    load,
    names,
    posed,
    table,
)
from te_bench.kernels.attention.packed import attend_packed
from te_bench.kernels.measured import Timing

#: The preference on Hopper, if nothing near was measured.
HOPPER = ("cudnn", "flash", "mem_efficient", "math")
#: Elsewhere cuDNN is not reliably faster, so this is PyTorch's own order.
OTHER_GPU = ("flash", "mem_efficient", "math")
CPU = ("flash", "math")
#: On a GPU these come first for windows and packed sequences: hidden keys cost them no time, and masks no memory.
WINDOWED = ("triton",)

RIVALS = frozenset(name for name in names() if name != AUTO and not in_fp8(name))
DTYPES = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The backend chosen for a problem, and why."""

    name: str
    why: str


def preference(problem: Problem) -> tuple[str, ...]:
    """Return the backends to try for an unmeasured problem, the fastest first; math does everything."""
    if problem.device == "cpu":
        return CPU
    hopper = problem.capability is not None and problem.capability[0] == 9
    return (WINDOWED if problem.window is not None or problem.packed else ()) + (HOPPER if hopper else OTHER_GPU)


def choose(problem: Problem, here: str | None = None) -> Choice:
    """Return `auto`'s choice for a problem on the machine `here` (default: the current one); runs nothing.

    Raises ValueError if the user's table cannot be read.
    """
    if here is None:
        gpu = torch.cuda.get_device_name() if problem.device == "cuda" and torch.cuda.is_available() else None
        here = measured.machine_name(problem.device, gpu)  # the bare word for an absent GPU
    measurement = table.nearest(here, problem)
    if measurement is not None:
        row, doublings = measurement
        for name in (name for name in row.fastest() if name in RIVALS):  # others no longer exist
            if _is_supported(name, problem):
                where = "measured" if doublings == 0 else f"nearest measured, {doublings:.1f} doublings away"
                return Choice(name=name, why=f"{where}: {_label(row)} ({row.source})")
    for name in preference(problem):
        if _is_supported(name, problem):
            return Choice(name=name, why="nothing near was measured: the first of the preference that can")
    raise AssertionError("math does everything")


def _is_supported(name: str, problem: Problem) -> bool:
    backend = load(name)
    return backend.unsupported(posed(backend, problem)) is None


def _label(row: Timing) -> str:
    p = row.problem
    mask = "causal" if p.causal else "full"
    times = ", ".join(f"{name} {row.seconds[name] * 1e6:.0f}" for name in row.fastest())
    return f"B{p.batch} H{p.heads} T{p.length} D{p.head_dim} {p.dtype} {mask} on {row.machine}, us: {times}"


# Keyed by everything that the choice depends on. Backends are loaded when chosen: torch.compile cannot trace an import.
_choices: dict[tuple[object, ...], Choice] = {}
_backends: dict[str, Backend] = {}
measured.on_forget(_choices.clear)


def chosen() -> tuple[str, ...]:
    """Return the names of the backends chosen in this process."""
    return tuple(sorted({choice.name for choice in _choices.values()}))


def choices() -> tuple[Choice, ...]:
    """Return the choices in this process, with their reasons."""
    return tuple(dict.fromkeys(_choices.values()))


@compiler.constant
def _decide(
    device: str, index: int | None, dtype: torch.dtype, causal: bool, drops: int, mask: bool, packed: bool,
    left: int, right: int, *sizes: int,
) -> str:  # fmt: skip
    """Return the backend's name; window (-1, -1) is none. sizes: B, H, T, D, Hkv, S, Dv."""
    key = device, index, dtype, causal, drops, mask, packed, left, right, sizes
    choice = _choices.get(key)
    if choice is None:
        batch, heads, length, head_dim, kv_heads, kv_length, v_head_dim = sizes
        cuda = device == "cuda"
        problem = Problem(
            batch=batch,
            heads=heads,
            length=length,
            head_dim=head_dim,
            dtype=DTYPES[dtype],
            causal=causal,
            dropout=0.5 if drops else 0.0,  # any value
            device=device,
            capability=torch.cuda.get_device_capability(index) if cuda else None,
            kv_heads=kv_heads,
            kv_length=kv_length,
            v_head_dim=v_head_dim,
            mask=mask,
            window=None if (left, right) == (-1, -1) else (left, right),
            packed=packed,
        )
        choice = choose(problem, measured.machine_name(device, torch.cuda.get_device_name(index) if cuda else None))
        _backends[choice.name] = load(choice.name)
        _choices[key] = choice
    return choice.name


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    scale: float,
    dropout: float = 0.0,
    mask: Tensor | None = None,
    window: tuple[int, int] | None = None,
) -> Tensor:
    """Compute `attend` by the chosen backend."""
    sizes = (*q.shape, k.shape[1], k.shape[2], v.shape[3])
    backend = _chosen_for(q, sizes, causal, dropout, mask is not None, False, window)
    return attend(backend, q, k, v, causal=causal, scale=scale, dropout=dropout, mask=mask, window=window)


def packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts_q: Tensor,
    starts_k: Tensor,
    longest: tuple[int, int],
    *,
    causal: bool,
    scale: float,
    dropout: float = 0.0,
    window: tuple[int, int] | None = None,
) -> Tensor:
    """Compute `attend_packed` by the chosen backend."""
    sizes = (len(starts_q) - 1, q.shape[1], longest[0], q.shape[2], k.shape[1], longest[1], v.shape[2])
    backend = _chosen_for(q, sizes, causal, dropout, False, True, window)
    options: dict[str, Any] = {"causal": causal, "scale": scale, "dropout": dropout, "window": window}
    return attend_packed(backend, q, k, v, starts_q, starts_k, longest, **options)


def _chosen_for(
    q: Tensor, sizes: tuple[int, ...], causal: bool, dropout: float, mask: bool, packed: bool,
    window: tuple[int, int] | None,
) -> Backend:  # fmt: skip
    left, right = (-1, -1) if window is None else window
    drops = 1 if dropout > 0 else 0  # a branch, like `index`, turns variable values into constants, with one graph each
    if torch.compiler.is_compiling():
        sizes = tuple([operator.index(n) for n in sizes])
    return _backends[_decide(q.device.type, q.device.index, q.dtype, causal, drops, mask, packed, left, right, *sizes)]


BACKEND = Backend(
    forward=forward,
    windows=True,
    packed=packed,
    choose=lambda problem: choose(problem).name,
    chosen=chosen,
)
