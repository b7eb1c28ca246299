"""attention_kernel(name): every DotProductAttention below it uses that backend, or says why it can't.

    with te.attention_kernel("cudnn"):
        out = layer(x)

Without it each takes the first of `preference` that can do what it is asked; `report` says which, and why not the others.
"auto" takes what was measured to be the fastest (kernels/attention/auto.py).
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from te_bench.kernels import attention
from te_bench.kernels.attention import Backend, Problem, posed
from te_bench.kernels.attention.auto import HOPPER, WINDOWED, preference

#: The name that the innermost attention_kernel asks for. One for the process, like te.autocast, and not for the thread:
#: on a GPU an activation checkpoint recomputes in a thread of autograd's, and must find the kernel of the forward pass.
current: str | None = None

# Loaded beforehand, because torch.compile can't trace an import.
_backends: dict[str, Backend] = {name: attention.load(name) for name in (*HOPPER, *WINDOWED)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """chosen: the backend that runs, `auto`'s choice where that is asked for, None if the one asked for can't.

    reasons: why not, for each that can't.
    """

    chosen: str | None
    reasons: Mapping[str, str]

    def __str__(self) -> str:
        lines = [f"{self.chosen} runs" if self.chosen else "the backend asked for can't"]
        return "\n".join([*lines, *(f"{name}: {reason}" for name, reason in self.reasons.items())])


@contextlib.contextmanager
def attention_kernel(name: str) -> Iterator[None]:
    """Use backend `name` of te_bench.kernels.attention below; nested ones override. Raises ValueError for an unknown name.

    A DotProductAttention whose problem the backend can't do raises ValueError with the reason: nothing else steps in.
    """
    _backends[name] = attention.load(name)
    with within(name):
        yield


@contextlib.contextmanager
def within(name: str | None) -> Iterator[None]:
    """As it was when `current` was `name`, None among them: for what computes again later, activation checkpoints."""
    global current
    before, current = current, name
    try:
        yield
    finally:
        current = before


def choose(problem: Problem) -> str:
    """The backend that attention_kernel asks for, or the first preference that can. Raises ValueError if that can't."""
    if current is not None:
        reason = _unable(_backends[current], problem)
        if reason is not None:
            able = [name for name in attention.names() if _unable(attention.load(name), problem) is None]
            raise ValueError(f"attention_kernel({current!r}) can't do this: {reason}. Able: {', '.join(able)}.")
        return current
    for name in preference(problem):
        if _unable(_backends[name], problem) is None:
            return name
    raise AssertionError("math does everything")


def _unable(backend: Backend, problem: Problem) -> str | None:
    """Why the backend can't do the problem as `attend` would put it, or None."""
    return backend.unsupported(posed(backend, problem))


def backend(name: str) -> Backend:
    """A backend that `choose` gave."""
    return _backends[name]


def report(problem: Problem) -> Report:
    """What `choose` gives for a problem, and every backend's reason against it."""
    said = {name: _unable(attention.load(name), problem) for name in attention.names()}
    reasons = {name: reason for name, reason in said.items() if reason is not None}
    return Report(chosen=None if current in reasons else attention.rival(choose(problem), problem), reasons=reasons)
