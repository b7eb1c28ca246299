"""What the tests of several kernels share: the error rule, FP8 tensors code by code, bandwidth against a copy."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from te_bench.kernels.quantize import Quantized

FLOATS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def supported(family: Any, name: str, device: str, **problem: Any) -> Any:
    """A rival of te_bench.kernels.FAMILY; skips the test, with the rival's own reason, where it has one."""
    capability = torch.cuda.get_device_capability() if device == "cuda" else None
    backend = family.load(name)
    if reason := backend.unsupported(family.Problem(device=device, capability=capability, **problem)):
        pytest.skip(reason)
    return backend


def know(*rows: Any) -> None:
    """Make these the user's own table of measured times, and read it."""
    from te_bench.kernels import measured

    path = measured.user_table()
    assert path is not None
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(measured.text(rows))
    measured.forget()


def largest(x: Tensor) -> float:
    return x.double().abs().max().item() if x.numel() else 0.0


def assert_as_good(name: str, ours: Tensor, library: Tensor, exact: Tensor) -> None:
    """error <= 2 x the library's at the same dtype + what storing the exact answer costs + 16 float32 roundings."""
    assert ours.shape == exact.shape, name
    assert ours.dtype == library.dtype, name
    assert ours.isfinite().all(), name
    floor = 2 * largest(exact.to(ours.dtype) - exact) + 16 * torch.finfo(torch.float32).eps * largest(exact)
    assert largest(ours - exact) <= 2 * largest(library - exact) + floor, name


def codes(x: Tensor) -> Tensor:
    """FP8 values' places in the order of all values of their format, int32; NaN is at +-127."""
    bits = x.view(torch.uint8).to(torch.int32)
    return torch.where(bits < 128, bits, 128 - bits)


def assert_quantized_alike(ours: Quantized, exact: Quantized) -> None:
    """Bitwise equal, but for one element in a thousand (or one) that may be a neighbour, its source rounded otherwise.

    Both layouts of ours hold the same bits, and the scales are the same.
    """
    assert ours.layout == exact.layout
    for value, wanted in zip(ours[:4], exact[:4], strict=True):
        assert (value is None) == (wanted is None)
        if wanted is None:
            continue
        assert value.dtype == wanted.dtype
        assert value.shape == wanted.shape
        assert value.is_contiguous()
        if wanted.dtype == torch.float32:
            assert torch.equal(value, wanted)
        else:
            apart = (codes(value) - codes(wanted)).abs()
            # Near zero, where terms cancel, float32's own roundings are several of E5M2's codes.
            noise = 16 * torch.finfo(torch.float32).eps * torch.finfo(wanted.dtype).max
            cancelled = (value.float() - wanted.float()).abs() <= noise
            assert apart[~cancelled].numel() == 0 or apart[~cancelled].max() <= 1
            assert (apart > 0).sum() <= max(1, wanted.numel() // 1000)
    if ours.data is not None and ours.data_t is not None:
        assert torch.equal(ours.data.view(torch.uint8).t(), ours.data_t.view(torch.uint8))


def assert_cast_alike(ours: Sequence[Any], exact: Sequence[Any], x: Tensor) -> None:
    """Quantized, amax and counts of what was computed from x before, where x's dtype may round it otherwise."""
    assert_quantized_alike(ours[0], exact[0])
    torch.testing.assert_close(ours[1], exact[1], rtol=2 * torch.finfo(x.dtype).eps + 1e-6, atol=0)
    assert ((ours[2] - exact[2]).abs() <= max(1, x.numel() // 1000)).all()


def seconds(call: Callable[[], object]) -> float:
    """Median time of a call on the GPU, out of a CUDA graph, so that the host's share is not counted."""
    from te_bench.experiments import timing

    for _ in range(3):
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return statistics.median(timing.kernel(graph.replay, "cuda"))


def of_copy(call: Callable[[], object], nbytes: int, x: Tensor, label: str) -> float:
    """The call's bytes a second over those of a copy of x; printed with its GB/s."""
    y = torch.empty_like(x)
    copy = 2 * x.numel() * x.element_size() / seconds(lambda: y.copy_(x))
    rate = nbytes / seconds(call)
    print(f"{label:40s} {tuple(x.shape)!s:16s} {rate / 1e9:6.0f} GB/s, {rate / copy:.2f} of a copy's {copy / 1e9:.0f}")
    return rate / copy


class WithoutHostTensors(TorchDispatchMode):
    """Refuses torch.tensor and new_tensor: on a GPU they copy a host's tensor, which no graph can capture."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten.lift_fresh.default, "a tensor is made on the host"
        return func(*args, **(kwargs or {}))


def captured(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """The call as a graph, so that launching it costs no more than a copy's launch."""
    call()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph
