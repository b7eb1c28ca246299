"""The torch operators around kernels: what torch.compile and a profiler see of a launcher."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, get_args

import torch
from torch import Tensor


def define(
    name: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    plain: Callable[..., Any] | None = None,
    writes: Sequence[str] = (),
    leading: int | None = None,
) -> Callable[..., Any]:
    """Define and return operator te_bench::NAME, whose schema is the annotations of run's `leading` parameters, or of all.

    The first one is a tensor, or a list of them. run computes on a GPU, plain(**arguments) elsewhere, if given; what
    plain returns is made contiguous, as fakes of such operators are.
    fake(*arguments) returns empty results for torch.compile. Operators can return neither None nor two tensors in one
    memory: an empty tensor of x's dtype is None, and the second is copied. writes: names of arguments that run writes
    to.
    """
    signature = inspect.signature(run)
    parameters = list(signature.parameters.values())[:leading]
    names = [parameter.name for parameter in parameters]
    last = max(
        map(names.index, writes), default=-1
    )  # a written argument has no default: tests/kernels/test_operators.py
    parameters = [p.replace(default=p.empty) if i <= last else p for i, p in enumerate(parameters)]

    def compute(*given: Any) -> Any:
        x = given[0][0] if isinstance(given[0], list) else given[0]
        if plain is None or x.is_cuda:
            return _apart(_without_none(x, run(*given)))
        made = _without_none(x, plain(**dict(zip(names, given, strict=False))))
        return made.contiguous() if isinstance(made, Tensor) else _apart(tuple([t.contiguous() for t in made]))

    results = get_args(signature.return_annotation)
    returns: Any = tuple[(Tensor,) * len(results)] if results else Tensor  # type: ignore[misc]
    compute.__signature__ = signature.replace(parameters=parameters, return_annotation=returns)  # type: ignore[attr-defined]
    operator = torch.library.custom_op(f"te_bench::{name}", compute, mutates_args=writes)
    operator.register_fake(lambda x, *rest: _without_none(x[0] if isinstance(x, list) else x, fake(x, *rest)))
    return operator


def operator(name: str, run: Callable[..., Any], fake: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Return a function that is `run` in eager mode, and under torch.compile the operator that `define` makes of it.

    An eager call skips the operator, because that costs the host about 20 us a call. Give arguments with defaults by
    name.
    """
    compiled = define(name, run, fake, **options)
    defaults = {p.name: p.default for p in inspect.signature(run).parameters.values() if p.default is not p.empty}
    if (leading := options.get("leading")) is not None:
        defaults = {key: defaults[key] for key in list(inspect.signature(run).parameters)[:leading] if key in defaults}

    def call(*given: Any, **named: Any) -> Any:
        return compiled(*given, **defaults | named) if torch.compiler.is_compiling() else run(*given, **named)

    return call


def _without_none(x: Tensor, made: Any) -> Any:
    return tuple(x.new_empty(0) if t is None else t for t in made) if isinstance(made, tuple | list) else made


def _apart(made: Any) -> Any:
    if isinstance(made, Tensor):
        return made
    memories = [t.untyped_storage()._cdata for t in made]
    return tuple(t.clone() if memories[i] in memories[:i] else t for i, t in enumerate(made))


def takes_two_steps(dtype: torch.dtype, rows: int, columnwise: bool) -> bool:
    """Return whether a cast needs a separate kernel: fused ones work on pairs of half-precision rows."""
    return dtype is torch.float32 or (columnwise and rows % 2 == 1)
