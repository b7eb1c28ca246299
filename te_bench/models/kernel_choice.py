"""attention_kernel(name): every DotProductAttention below it uses that backend, or says why it can't.

    with te.attention_kernel("cudnn"):
        out = layer(x)

Without it each uses the first of `preference` that supports the problem; `report` says which, and why not the others.
"auto" uses the fastest measured (kernels/attention/backends/auto.py).
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from te_bench.kernels import attention
from te_bench.kernels.attention import Backend, Problem, posed
from te_bench.kernels.attention.backends.auto import HOPPER, WINDOWED, preference

#: The name that the innermost attention_kernel requests. It is global, not per thread: on a GPU, checkpoints recompute
#: in an autograd thread, which must find the forward pass's kernel.
current: str | None = None

FP8 = ("triton_fp8", "manual_fp8")  # under a recipe with fp8_dpa: on a GPU; where FP8 is emulated

# Loaded here because torch.compile cannot trace an import.
_backends: dict[str, Backend] = {name: attention.load(name) for name in (*HOPPER, *WINDOWED, *FP8)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """chosen: the backend that runs (`auto` gives its choice); None if the requested one cannot.

    reasons: for each backend that cannot, why.
    """

    chosen: str | None
    reasons: Mapping[str, str]

    def __str__(self) -> str:
        lines = [f"{self.chosen} runs" if self.chosen else "the backend asked for can't"]
        return "\n".join([*lines, *(f"{name}: {reason}" for name, reason in self.reasons.items())])


@contextlib.contextmanager
def attention_kernel(name: str) -> Iterator[None]:
    """Use backend `name` of te_bench.kernels.attention inside; nested ones override. Raises ValueError if unknown.

    A DotProductAttention whose problem the backend cannot do raises ValueError with the reason; nothing falls back.
    """
    global current
    _backends[name] = attention.load(name)
    before, current = current, name
    try:
        yield
    finally:
        current = before


def choose(problem: Problem, emulate: bool | None = None) -> str:
    """Return the requested backend, or the first preference that can. Raises ValueError if the requested one cannot.

    emulate: None for the inputs' precision; otherwise FP8, and whether to emulate it.
    """
    if emulate is not None:
        return _choose_fp8(problem, emulate)
    if current is not None:
        reason = _reason_against(_backends[current], problem)
        if reason is not None:
            capable = [name for name in attention.names() if _reason_against(attention.load(name), problem) is None]
            raise ValueError(f"attention_kernel({current!r}) can't do this: {reason}. Able: {', '.join(capable)}.")
        return current
    for name in preference(problem):
        if _reason_against(_backends[name], problem) is None:
            return name
    raise AssertionError("math does everything")


def in_fp8(device: str, emulate: bool) -> str:
    """Return the default backend of FP8 attention."""
    on_a_gpu, emulated = FP8
    return emulated if emulate or device == "cpu" else on_a_gpu


def _choose_fp8(problem: Problem, emulate: bool) -> str:
    name = in_fp8(problem.device, emulate) if current is None else current
    if not _backends[name].fp8:
        raise ValueError(
            f"attention_kernel({name!r}) has no FP8, which the recipe's fp8_dpa=True asks for: leave one of them out, or "
            f"take {' or '.join(FP8)}"
        )
    reason = _reason_against(_backends[name], problem)
    if reason is not None:
        raise ValueError(
            f"fp8_dpa=True, but {name} can't do this: {reason}. Compute it under a recipe without fp8_dpa."
        )
    return name


def _reason_against(backend: Backend, problem: Problem) -> str | None:
    """Return why the backend cannot do the problem as `attend` would pose it, or None."""
    return backend.unsupported(posed(backend, problem))


def backend(name: str) -> Backend:
    """Return a backend that `choose` named."""
    return _backends[name]


def report(problem: Problem, emulate: bool | None = None) -> Report:
    """Return what `choose` gives for a problem, and every backend's reason against it."""
    said = {name: _reason_against(attention.load(name), problem) for name in attention.names()}
    if emulate is not None:
        said |= {name: "no FP8, which fp8_dpa=True asks for" for name in said if not attention.in_fp8(name)}
    reasons = {name: reason for name, reason in said.items() if reason is not None}
    asked = in_fp8(problem.device, emulate) if emulate is not None and current is None else current
    chosen = None if asked in reasons else attention.rival(choose(problem, emulate), problem)
    return Report(chosen=chosen, reasons=reasons)
