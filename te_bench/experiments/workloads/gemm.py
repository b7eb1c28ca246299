"""One GEMM that is chosen by measured times: in FP8, in half precision, or an MLP's with its activation in the epilogue.

problem: what kernels.gemm.table.GemmShape has, and backend, one of its rivals; precision is the dtype of D.
samples: kernel_s of single calls. work: flop = 2 M N K. check: the largest error of all that leaves, in rows that fit into
memory, against float64 of the same operands: at most twice that of plain PyTorch, rounded as the rival rounds, and a floor.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from te_bench.experiments import timing, trial_model
from te_bench.experiments.checks.quantity import CHECKED_BEFORE, Quantity, judge
from te_bench.experiments.checks.timed import Timed
from te_bench.experiments.checks.tolerances import FACTOR, GEMM_FLOOR
from te_bench.experiments.measurement import Context, Measurement, require
from te_bench.experiments.problems import GemmProblem
from te_bench.experiments.spec import Trial
from te_bench.kernels import activation, gemm
from te_bench.kernels.activation.backends import reference
from te_bench.kernels.gemm import half, table
from te_bench.kernels.gemm.table import GemmShape
from te_bench.kernels.quantize import BLOCKS, ROW, SQUARE, STRIP, Layout, Operand
from te_bench.kernels.quantize.backends import reference as quantizer

ACTIVATION = "gelu_erf"
CHECKED_TOGETHER = 2**24  # elements of D that float64 computes at a time

Call = Callable[[], tuple[Tensor, ...]]
OfRows = Callable[[slice], tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True)
class Case:
    """A call to time, and what leaves it for some rows: in float64, and rounded by plain PyTorch."""

    call: Call
    exact: OfRows
    yardstick: OfRows
    floor: float


def run(trial: Trial, context: Context) -> Measurement:
    trial_model.require_device(trial.device)
    p = GemmProblem.of(trial)
    shape = GemmShape(**{f.name: getattr(p, f.name) for f in dataclasses.fields(GemmShape)})
    torch.manual_seed(trial.seed)
    build = _fp8 if shape.dtype == "e4m3" else _product if shape.epilogue is None else _with_activation
    case = build(shape, p.backend, trial.device)
    check = _held_to_float64(shape, case) if context.check else CHECKED_BEFORE
    timed = Timed(case.call)
    samples = {"kernel_s": timed.samples(timing.kernel, trial.device)}
    names = timed.seen(trial.device).names if context.check else []
    work: dict[str, Any] = {"flop": 2 * shape.m * shape.n * shape.k}
    return Measurement(check=check, work=work, samples=samples, kernels=names)


def _fp8(shape: GemmShape, name: str, device: str) -> Case:
    rival = gemm.load(name)
    of_a, of_b = (Layout(torch.float8_e4m3fn, BLOCKS[kind], torch.float32) for kind in table.SCALES[shape.scales or ""])
    require(
        name,
        rival.unsupported(
            gemm.Problem(m=shape.m, n=shape.n, k=shape.k, a=of_a, b=of_b, **trial_model.machine_of(device))
        ),
    )
    a, b = (_quantized(rows, shape.k, layout, device) for rows, layout in ((shape.m, of_a), (shape.n, of_b)))
    options: dict[str, Any] = {"out_dtype": torch.bfloat16, "fast_accum": shape.fast_accum}
    plain = gemm.load("reference").forward

    def part(rows: slice) -> Operand:
        return Operand(a.data[rows], a.scale_inv if shape.scales == "tensor" else a.scale_inv[rows], of_a)

    on_tensor_cores = device == "cuda" and name != "reference"
    return Case(
        call=lambda: (rival.forward(a, b, **options),),
        exact=lambda rows: (_in_float64(part(rows)) @ _in_float64(b).t(),),
        yardstick=lambda rows: (plain(part(rows), b, **options),),
        floor=GEMM_FLOOR[("fast" if shape.fast_accum else "promoted") if on_tensor_cores else "float32"],
    )


def _quantized(rows: int, k: int, layout: Layout, device: str) -> Operand:
    """Return normal data in E4M3: a tensor core's power and clock depend on the values."""
    x = torch.randn(rows, k, device=device)
    if layout.block in (STRIP, SQUARE):
        options: dict[str, Any] = {"rowwise": True, "columnwise": False, "power_of_two": True}
        return quantizer.quantize(x, layout.format, layout.block, **options).by_rows()
    scale_inv = (x.abs().amax(1, keepdim=True) if layout.block == ROW else x.abs().amax()) / 448
    return Operand((x / scale_inv).to(layout.format), scale_inv.view(layout.scale_shape(rows, k)), layout)


def _in_float64(x: Operand) -> Tensor:
    return x.data.double() * quantizer.spread(x)


def _product(shape: GemmShape, name: str, device: str) -> Case:
    a, b = _drawn(shape.m, shape.k, device), _drawn(shape.n, shape.k, device) / shape.k**0.5
    _require_half(shape, name, device)
    call: Call = (lambda: (half.product(a, b, None),)) if name == table.GLUON else lambda: (a @ b.t(),)
    return Case(
        call=call,
        exact=lambda rows: (a[rows].double() @ b.double().t(),),
        yardstick=lambda rows: (a[rows] @ b.t(),),
        floor=GEMM_FLOOR["float32"],
    )


def _with_activation(shape: GemmShape, name: str, device: str) -> Case:
    """Return the case of h = a @ b.T and f(h), or of a GRADIENT, (a @ b) * f'(h)."""
    _require_half(shape, name, device)
    f = activation.load("triton" if device == "cuda" else "reference")
    a = _drawn(shape.m, shape.k, device)
    if shape.epilogue == table.ACTIVATED:
        up = _drawn(shape.n, shape.k, device) / shape.k**0.5

        def forward(x: Tensor, function: Any = reference) -> tuple[Tensor, ...]:
            h = x @ up.to(x.dtype).t()
            return h, function.forward(h, ACTIVATION)

        in_one: Call = lambda: half.activated(a, up, None, ACTIVATION)  # noqa: E731
        call: Call = in_one if name == table.GLUON else lambda: forward(a, f)
        return Case(call, lambda rows: forward(a[rows].double()), lambda rows: forward(a[rows]), GEMM_FLOOR["float32"])
    down, h = _drawn(shape.k, shape.n, device) / shape.k**0.5, _drawn(shape.m, shape.n, device)

    def backward(g: Tensor, x: Tensor, function: Any = reference) -> tuple[Tensor, ...]:
        return (function.backward(g @ down.to(g.dtype), x, ACTIVATION),)

    in_one = lambda: (half.gradient(a, down, h, ACTIVATION),)  # noqa: E731
    return Case(
        call=in_one if name == table.GLUON else lambda: backward(a, h, f),
        exact=lambda rows: backward(a[rows].double(), h[rows].double()),
        yardstick=lambda rows: backward(a[rows], h[rows]),
        floor=GEMM_FLOOR["float32"],
    )


def _drawn(rows: int, columns: int, device: str) -> Tensor:
    return torch.randn(rows, columns, device=device).bfloat16()


def _require_half(shape: GemmShape, name: str, device: str) -> None:
    if name == table.GLUON:
        require(name, half.unsupported(shape.n, shape.k, device, trial_model.capability(device)))


def _held_to_float64(shape: GemmShape, case: Case) -> dict[str, Any]:
    """Raise CheckFailed where a result errs more than it may."""
    outs = case.call()
    ours, theirs, sizes = ([0.0] * len(outs) for _ in range(3))
    each = max(1, CHECKED_TOGETHER // shape.n)
    for start in range(0, shape.m, each):
        rows = slice(start, start + each)
        for i, (out, exact, known) in enumerate(zip(outs, case.exact(rows), case.yardstick(rows), strict=True)):
            ours[i] = _larger(ours[i], out[rows].double() - exact)
            theirs[i] = _larger(theirs[i], known.double() - exact)
            sizes[i] = _larger(sizes[i], exact)
    names = ("D", "f(D)")
    quantities = [
        Quantity(names[i], ours[i], FACTOR * theirs[i] + case.floor * sizes[i]) for i in range(len(outs))
    ]  # fmt: skip
    return judge("fp64 of the same operands", quantities)


def _larger(known: float, x: Tensor) -> float:
    """Return the larger of known and max |x|; NaN if there is one."""
    return torch.maximum(x.abs().max(), x.new_tensor(known)).item()
