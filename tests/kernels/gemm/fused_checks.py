"""What a GEMM with an epilogue must pass, as functions, so that broken ones can be shown to fail it."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from gemm_checks import Operands, close, product
from torch import Tensor
from torch.nn import functional as F

from te_bench.kernels import quantize
from te_bench.kernels.gemm import Epilogue, Product
from te_bench.kernels.gemm.operands import DTYPES
from te_bench.kernels.quantize import TENSOR, Layout

#: By PyTorch itself, in whichever precision, not by te_bench's formulas.
FUNCTIONS: dict[str | None, Callable[[Tensor], Tensor]] = {
    None: lambda x: x,
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": torch.relu,
    "srelu": lambda x: torch.relu(x).square(),
    "silu": F.silu,
}

EPILOGUES = {
    "nothing": Epilogue(),
    "gelu": Epilogue(activation="gelu"),
    "gelu kept": Epilogue(activation="gelu", keep=True),
    "gelu in FP8": Epilogue(activation="gelu", keep=True, out=False, target="e4m3", columnwise=True),
    "srelu in FP8 rows": Epilogue(activation="srelu", out=False, target="e4m3"),
    "residual": Epilogue(residual=True),
    "FP8 columns": Epilogue(target="e5m2", rowwise=False, columnwise=True),
    "residual in FP8": Epilogue(residual=True, target="e4m3", columnwise=True),
    "everything": Epilogue(activation="gelu", keep=True, residual=True, target="e4m3", columnwise=True),
}


class Given(NamedTuple):
    operands: Operands
    epilogue: Epilogue
    out_dtype: torch.dtype
    bias: Tensor | None
    residual: Tensor | None
    scale: Tensor | None

    def options(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in ("epilogue", "out_dtype", "bias", "residual", "scale")}


def given(operands: Operands, epilogue: Epilogue, out_dtype: torch.dtype) -> Given:
    """Operands with x of about 1 (where an activation is neither 0 nor x), and all that the epilogue takes.

    The scale lets an element in a thousand saturate.
    """
    device, generator = operands.a.data.device, torch.Generator().manual_seed(7)
    scale_inv = operands.a.scale_inv / product(operands).std().float()
    operands = operands._replace(a=operands.a._replace(scale_inv=scale_inv))
    shape = operands.a.data.shape[0], operands.b.data.shape[0]
    bias = torch.randn(shape[1], generator=generator).to(device)
    residual = torch.randn(shape, generator=generator).to(device, out_dtype) if epilogue.residual else None
    scale = None
    if epilogue.target is not None:
        y = _in(torch.float64, operands, epilogue, bias, residual)[1].abs().flatten()
        largest = {"e4m3": 448.0, "e5m2": 57344.0}[epilogue.target]
        scale = (largest / y.kthvalue(max(1, y.numel() * 999 // 1000)).values).float()
    return Given(operands, epilogue, out_dtype, bias, residual, scale)


def _in(
    dtype: torch.dtype,
    operands: Operands,
    epilogue: Epilogue,
    bias: Tensor | None,
    residual: Tensor | None,
    rounding: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """x and y, computed in dtype; with `rounding` as what is rounded to it where an Epilogue rounds."""

    def at(x: Tensor) -> Tensor:
        return x if rounding is None else x.to(rounding)

    x = product(operands, bias, dtype)
    if epilogue.activation is not None:
        x = at(x)
    y = FUNCTIONS[epilogue.activation](x.to(dtype))
    return x, at(y if residual is None else y + residual.to(dtype))


def check_product(made: Product, g: Given, *, floor: float, amax: Tensor | None = None) -> None:
    """AssertionError unless what was asked for is there, nothing else, and each <= 2 x float32's error, rounded, + floor.

    FP8 of an out that is there, its transpose and the amax are held to it bit for bit.
    """
    e = g.epilogue
    truth = _in(torch.float64, g.operands, e, g.bias, g.residual)
    library = _in(torch.float32, g.operands, e, g.bias, g.residual, g.out_dtype)
    for name, ours, wanted, i in (("pre", made.pre, e.keep, 0), ("out", made.out, e.out, 1)):
        assert (ours is not None) == wanted, name
        if wanted:
            assert ours.dtype == g.out_dtype, f"{name} {ours.dtype} instead of {g.out_dtype}"
            assert ours.shape == truth[i].shape, f"{name} {tuple(ours.shape)}"
            close(name, ours, library[i], truth[i], floor)
    assert (made.quantized is not None) == (e.target is not None)
    if made.quantized is None or e.target is None or g.scale is None:
        return
    layouts = {"rowwise": e.rowwise, "columnwise": e.columnwise}
    cast = quantize.load("reference").scaled
    assert made.quantized.layout == Layout(DTYPES[e.target], TENSOR, torch.float32)
    expected = cast(library[1] if made.out is None else made.out, g.scale, DTYPES[e.target], **layouts)
    for name, ours, theirs in zip(made.quantized._fields[:4], made.quantized[:4], expected[:4], strict=True):
        assert (ours is not None) == (theirs is not None), name
        if ours is None or name.startswith("scale_inv"):
            assert ours is None or torch.equal(ours, theirs), name
            continue
        assert ours.dtype == theirs.dtype, name
        assert ours.is_contiguous(), name
        if made.out is not None:
            assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)), name
        limit = float(torch.finfo(ours.dtype).max)
        clipped = (truth[1] * g.scale.double()).clamp(-limit, limit)
        close(name, *(x.float().t() if name == "data_t" else x.float() for x in (ours, theirs)), clipped, floor)
    if made.quantized.data is not None and made.quantized.data_t is not None:
        assert torch.equal(made.quantized.data.view(torch.uint8).t(), made.quantized.data_t.view(torch.uint8))
    if amax is not None and made.out is not None:
        assert amax == made.out.abs().max()
