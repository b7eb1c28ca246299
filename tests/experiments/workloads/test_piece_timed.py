"""A piece of the workload `piece`: checked, then timed, and no wrong one passes."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from planting import once, only_timed
from torch import Tensor

from te_bench.experiments import timing
from te_bench.experiments.measurement import CheckFailed, Context, Measurement, Unsupported
from te_bench.experiments.spec import Trial
from te_bench.experiments.suites.pieces import PIECES, rivals
from te_bench.experiments.workloads import piece as workload
from te_bench.kernels import activation, norm
from te_bench.kernels.quantize import Quantized

M, N = 48, 80
ALL = [(kind, call) for kind, calls in PIECES.items() for call in calls]
#: Bytes of an element of what is read and written, bf16 and both layouts of E4M3, for each element of what comes out.
BYTES = {
    ("norm", "forward"): 2 + 2,
    ("norm", "backward"): 4 + 2,
    ("norm", "forward_quantized"): 2 + 2,
    ("norm", "add_forward"): 4 + 4,
    ("norm", "add_forward_quantized"): 4 + 2 + 2,
    ("gelu", "forward"): 2 + 2,
    ("gelu", "backward"): 4 + 2,
    ("gelu", "forward_quantized"): 2 + 2,
    ("gelu", "backward_quantized"): 4 + 2,
    ("swiglu", "forward"): 4 + 2,
    ("swiglu", "backward"): 6 + 4,
    ("swiglu", "forward_quantized"): 4 + 2,
    ("swiglu", "backward_quantized"): 6 + 4,
}


@pytest.fixture(autouse=True)
def _once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "kernel", once)


def run(
    kind: str,
    call: str,
    backend: str,
    *,
    precision: str = "bf16",
    device: str = "cpu",
    mode: str = "eager",
    m: int = M,
    n: int = N,
) -> Measurement:
    problem = {"kind": kind, "call": call, "backend": backend, "m": m, "n": n}
    return workload.run(
        Trial(
            workload="piece", device=device, problem=problem, attention="none", precision=precision, protocol="kernel",
            mode=mode,
        ),
        Context(),
    )  # fmt: skip


@pytest.mark.parametrize(("kind", "call"), ALL, ids="-".join)
def test_each_piece_is_checked_and_timed_by_te_bench_and_by_torch(kind: str, call: str) -> None:
    for backend in rivals(kind, call):
        if backend == "liger":
            continue
        # On a CPU torch's own sums for dweight, in bf16 by one thread, are as wrong as the check allows.
        wide = backend == "torch" and call == "backward"
        found = run(kind, call, backend, precision="fp32" if wide else "bf16")
        assert [len(seconds) for seconds in found.samples.values()] == [1]
        names = {q["name"].partition(",")[0] for q in found.check["quantities"]}
        assert names >= {"dx"} if call.startswith("backward") else names >= {"y"}
        assert ("amax" in names) == call.endswith("quantized")
        assert ("sum" in names) == call.startswith("add")
        family = kind.removesuffix("_erf") if kind in activation.KINDS else "norm"
        vectors = (2 if kind == "layernorm" else 1) * (2 if call == "backward" else 1) if kind in norm.KINDS else 0
        amax = 4 * call.endswith("quantized")
        moved = BYTES[family, call] * M * N + 2 * vectors * N
        assert found.work == {"bytes": moved * (2 if wide else 1) + amax}


@pytest.mark.parametrize(("kind", "call"), [("rmsnorm", "backward"), ("swiglu", "forward_quantized")])
def test_compiled_it_is_checked_as_it_is_timed(kind: str, call: str) -> None:
    found = run(kind, call, "reference", mode="compile")
    assert found.check["quantities"]
    assert (found.work["graph_breaks"], found.work["recompiles"]) == (0, 0)


def test_who_cannot_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for kind in ("rmsnorm", "swiglu"):
        with pytest.raises(Unsupported, match="liger: pip install liger-kernel"):
            run(kind, "forward", "liger")


def _row(x: Tensor) -> Tensor:
    worst = x.float().norm(dim=1).argmax() if x.dim() > 1 else x.float().abs().argmax()
    return torch.where(torch.arange(len(x)).view(-1, *[1] * (x.dim() - 1)) == worst, 0, x.float()).to(x.dtype)


WRONG: dict[str, Callable[[Tensor], Tensor]] = {
    "zero": torch.zeros_like,
    "sign": lambda x: (-x.float()).to(x.dtype),
    "double": lambda x: (2 * x.float()).to(x.dtype),
    "3 % less": lambda x: (0.97 * x.float()).to(x.dtype),
    "a row": _row,
    "not a number": lambda x: torch.full_like(x, torch.nan),
}
#: Which result of the contract's functions is spoilt, and of FP8's which field.
PLACES = [
    ("rmsnorm", "forward", 0, None),
    ("rmsnorm", "backward", 0, None),
    ("rmsnorm", "backward", 1, None),
    ("layernorm", "backward", 2, None),
    ("layernorm", "add_forward", 0, None),
    ("layernorm", "add_forward", 1, None),
    ("rmsnorm", "add_forward_quantized", 1, "data_t"),
    ("rmsnorm", "forward_quantized", 0, "data"),
    ("swiglu", "forward", None, None),
    ("swiglu", "backward", None, None),
    ("gelu", "backward_quantized", None, "data_t"),
]


@pytest.mark.parametrize(
    ("kind", "call", "place", "field", "wrong"),
    [(*place, wrong) for place in PLACES for wrong in WRONG if wrong != "3 % less" or place[3] is None],
    ids=str,
)  # 3 % is half a step of E4M3: its rounding takes that back
def test_a_wrong_piece_fails(
    kind: str, call: str, place: int | None, field: str | None, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    family: Any = norm if kind in norm.KINDS else activation
    owner, load = family.load("reference"), family.load
    right = getattr(owner.residual if call.startswith("add") else owner, call)

    def spoil(found: Any) -> Any:
        if isinstance(found, Quantized):
            assert field is not None
            return found._replace(**{field: WRONG[wrong](getattr(found, field))})
        return WRONG[wrong](found)

    def function(*arguments: Any, **options: Any) -> Any:
        found = right(*arguments, **options)
        return spoil(found) if place is None else (*found[:place], spoil(found[place]), *found[place + 1 :])

    if call.startswith("add"):
        spoilt = dataclasses.replace(owner, residual=dataclasses.replace(owner.residual, **{call: function}))
    else:
        spoilt = dataclasses.replace(owner, **{call: function})
    monkeypatch.setattr(family, "load", lambda name: spoilt if name == "triton" else load(name))
    with pytest.raises(CheckFailed):
        run(kind, call, "triton")


def test_a_piece_that_is_right_only_until_it_is_timed_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    owner, load, calls = norm.load("reference"), norm.load, list[int]()

    def forward(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        y, *rest = owner.forward(*arguments, **options)
        return y if len(calls) == 1 else _row(y), *rest

    spoilt = dataclasses.replace(owner, forward=forward)
    monkeypatch.setattr(norm, "load", lambda name: spoilt if name == "triton" else load(name))
    with pytest.raises(CheckFailed, match=r"^y"):
        run("rmsnorm", "forward", "triton")


def test_a_piece_that_is_wrong_only_when_timed_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    now, right = only_timed(monkeypatch, "kernel"), workload.OPERATORS["rmsnorm"]
    monkeypatch.setitem(workload.OPERATORS, "rmsnorm", lambda *given: right(*given) * (not now()))
    with pytest.raises(CheckFailed, match=r"^y"):
        run("rmsnorm", "forward", "torch")


@pytest.mark.parametrize(("kind", "call"), [one for one in ALL if "torch" in rivals(*one)], ids="-".join)
@pytest.mark.parametrize(("asked", "who"), [("torch", "reference"), ("reference", "torch")])
def test_a_piece_by_another_backend_fails(kind: str, call: str, asked: str, who: str, monkeypatch: Any) -> None:
    of_torch, family = workload.OTHERS["torch", kind], norm if kind in norm.KINDS else activation
    if asked == "reference":
        other = lambda p, *given: of_torch(dataclasses.replace(p, backend=who), *given)  # noqa: E731
        monkeypatch.setitem(workload.OTHERS, (asked, kind), other)
    else:
        load = family.load
        monkeypatch.delitem(workload.OTHERS, (asked, kind))
        monkeypatch.setattr(family, "load", lambda name: load(who if name == asked else name))
    with pytest.raises(CheckFailed, match=f"^asked for {asked}, eager, but (nothing of )?torch ran$") as caught:
        run(kind, call, asked, precision="fp32")
    assert caught.value.measurement.samples == {}


def test_a_piece_that_was_to_be_compiled_and_is_not_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    with pytest.raises(CheckFailed, match=r"^asked for reference, compile, but nothing of torch\.compile ran$"):
        run("rmsnorm", "forward", "reference", mode="compile")


@pytest.mark.parametrize(("option", "change"), [("amax", lambda _: None), ("scale", lambda scale: 0.97 * scale)])
def test_a_cast_without_its_amax_or_by_another_scale_fails(
    option: str, change: Callable[[Tensor], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, load = norm.load("reference"), norm.load

    def function(*arguments: Any, **options: Any) -> Any:
        return owner.forward_quantized(*arguments, **{**options, option: change(options[option])})

    spoilt = dataclasses.replace(owner, forward_quantized=function)
    monkeypatch.setattr(norm, "load", lambda name: spoilt if name == "triton" else load(name))
    with pytest.raises(CheckFailed, match="amax" if option == "amax" else "y, scale"):
        run("rmsnorm", "forward_quantized", "triton")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "call", "backend"), [(*one, name) for one in ALL for name in rivals(*one)], ids="-".join
)
def test_on_a_gpu(kind: str, call: str, backend: str) -> None:
    """Small, and as a layer has them; a norm of 4096 columns, an activation of 14336."""
    if backend == "liger":
        pytest.importorskip("liger_kernel")
    mode = "compile" if backend == "reference" else "eager"
    width = 4096 if kind in norm.KINDS else 14336
    for m, n in ((M, N), (2048, width)):
        found = run(kind, call, backend, device="cuda", mode=mode, m=m, n=n)
        assert found.kernels
        assert found.work.get("graph_breaks", 0) == 0
