"""A kernel launched again is the one that Triton would have launched: by what launch does, and by every launcher's key."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from launch_checks import Recorder
from torch import Tensor

from te_bench.kernels import launch as _launch
from te_bench.kernels.activation import kernels as activation
from te_bench.kernels.activation.backends import triton as activation_triton
from te_bench.kernels.attention import fp8_quantize
from te_bench.kernels.attention.portable import backward as attention_backward_kernels
from te_bench.kernels.attention.portable import forward as attention_kernels
from te_bench.kernels.attention.portable import fp8_backward, fp8_forward
from te_bench.kernels.attention.portable import launch as attention_launch
from te_bench.kernels.attention.portable.forward import Extent
from te_bench.kernels.linear_cross_entropy import kernels as cross_entropy
from te_bench.kernels.norm import Norm
from te_bench.kernels.norm import kernels as norm
from te_bench.kernels.norm import residual_forward as residual_kernels
from te_bench.kernels.norm.backends import triton as norm_triton
from te_bench.kernels.quantize import BLOCKS, fine_kernels, kernels, packing
from te_bench.kernels.quantize import history as _history
from te_bench.kernels.quantize.backends import triton as quantize_triton
from te_bench.kernels.rotary import Rotated
from te_bench.kernels.rotary import kernels as rotary

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))


class Devices:
    """In torch.cuda.device's place, and the current one, 0 by default."""

    def __init__(self) -> None:
        self.current = 0

    @contextlib.contextmanager
    def __call__(self, device: int) -> Iterator[None]:
        before, self.current = self.current, device
        yield
        self.current = before


class Kernel:
    """A kernel of three arguments and two constants that writes down how it is compiled and run."""

    arg_names = ("x", "m", "bias", "FIRST", "SECOND")

    def __init__(self, devices: Devices | None = None) -> None:
        self.devices = devices or Devices()
        self.on: list[int] = []  # the current device of each launch
        self.compiled: list[tuple[Any, ...]] = []
        self.ran: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., SimpleNamespace]:
        def compile_and_run(*args: Any, **constants: Any) -> SimpleNamespace:
            self.compiled.append((grid, args, constants))
            self.on.append(self.devices.current)
            number = len(self.compiled)

            def run(*given: Any) -> None:
                self.ran.append((number, *given))
                self.on.append(self.devices.current)

            return SimpleNamespace(run=run, function="function", packed_metadata="metadata")

        return compile_and_run


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_launch, "_compiled", {})


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    devices = Devices()
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 100 + device, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: devices.current, raising=False)
    monkeypatch.setattr(torch.cuda, "device", devices)
    return Kernel(devices)


CONSTANTS = {"num_warps": 8, "SECOND": "second", "FIRST": "first"}  # in no order of the kernel's


def test_a_second_launch_runs_what_the_first_compiled(kernel: Kernel) -> None:
    first, second = torch.ones(4), torch.ones(4)
    _launch.launch(kernel, 3, ("key", 7), 1, (first, 7, None), CONSTANTS, 5)
    assert kernel.compiled == [((3, 5), (first, 7, None), CONSTANTS)]
    assert kernel.ran == []  # compiling it launched it
    _launch.launch(kernel, 4, ("key", 7), 1, (second, 7, None), CONSTANTS, 6)
    assert len(kernel.compiled) == 1
    handles = (101, "function", "metadata", None, None, None)
    assert kernel.ran == [(1, 4, 6, 1, *handles, second.data_ptr(), 7, None, "first", "second")]
    _launch.launch(kernel, 9, ("key", 7), 1, (second, 7, None), CONSTANTS)
    assert kernel.ran[1][1:4] == (9, 1, 1)


def test_another_key_device_or_kernel_is_compiled_anew(kernel: Kernel) -> None:
    other, x = Kernel(), torch.ones(4)
    for device, key in ((0, ("a", 1)), (0, ("a", 2)), (1, ("a", 1)), (0, ("a",))):
        _launch.launch(kernel, 1, key, device, (x, 7, None), CONSTANTS)
    _launch.launch(other, 1, ("a", 1), 0, (x, 7, None), CONSTANTS)
    assert (len(kernel.compiled), len(other.compiled), kernel.ran, other.ran) == (4, 1, [], [])
    _launch.launch(kernel, 1, ("a", 1), 1, (x, 7, None), CONSTANTS)
    assert [number for number, *_ in kernel.ran] == [3]


def test_it_is_launched_on_the_tensors_device_whichever_is_the_current_one(kernel: Kernel) -> None:
    x = torch.ones(4)
    for device in (1, 1, 0, 0):
        _launch.launch(kernel, 1, (), device, (x, 7, None), CONSTANTS)
    assert kernel.on == [1, 1, 0, 0]
    assert [ran[4] for ran in kernel.ran] == [101, 100]  # its stream
    assert kernel.devices.current == 0


def test_lengths_that_never_repeat_do_not_fill_the_memory(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_launch, "KEPT", 3)
    for m in range(10):
        _launch.launch(kernel, 1, (m,), 0, (torch.ones(4), m, None), CONSTANTS)
        assert 1 <= len(_launch._compiled) <= 3
    _launch.launch(kernel, 1, (9,), 0, (torch.ones(4), 9, None), CONSTANTS)
    assert len(kernel.compiled) == 10


@pytest.mark.parametrize("device", DEVICES)
def test_an_allocator_makes_what_it_is_asked_for(device: str) -> None:
    empty = _launch.allocator(torch.empty(0, device=device).get_device())
    for shape, strides, dtype in (((3, 4), (1, 3), E4M3), ((), (), FP32), ((2,), (4,), torch.int64)):
        made = empty(shape, strides, dtype)
        assert (made.shape, made.stride(), made.dtype, made.device.type) == (shape, strides, dtype, device)


def test_an_allocator_is_of_the_tensor_s_device_not_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1, raising=False)
    monkeypatch.setattr(torch, "empty_strided", lambda *given, **more: asked.append((given, more)))
    assert _launch.allocator(1) is torch._C._dynamo.guards._empty_strided_cuda
    _launch.allocator(0)((2, 3), (3, 1), BF16)
    assert asked == [(((2, 3), (3, 1)), {"dtype": BF16, "device": 0})]


@pytest.fixture(scope="module")
def known() -> Recorder:
    """One for all tests: launchers share kernels."""
    return Recorder()


@pytest.fixture
def recorder(known: Recorder, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    modules = (
        activation,
        norm,
        residual_kernels,
        kernels,
        fine_kernels,
        rotary,
        attention_launch,
        cross_entropy,
        packing,
        _launch,
    )
    for module in modules:
        monkeypatch.setattr(module, "launch", known.launch)
    return known


def matrix(m: int, n: int, dtype: torch.dtype = BF16, offset: int = 0, stride: int = 48) -> Tensor:
    """An (m, n) view, its address `offset` elements behind a multiple of 16 bytes, its rows `stride` elements apart."""
    return torch.zeros(m * stride + offset, dtype=dtype)[offset:].as_strided((m, n), (stride, 1), offset)


def vector(n: int, which: str | None, dtype: torch.dtype = FP32) -> Tensor | None:
    """None, or n numbers: "plain", "shifted" by one, or in "other" precision."""
    if which is None:
        return None
    return torch.zeros(n + 1, dtype=FP16 if which == "other" else dtype)[1 if which == "shifted" else 0 :][:n]


LAYOUTS = ((True, True), (True, False), (False, True))
VIEW = {"offset": (0, 1, 8), "stride": (48, 49, 64), "m": (17, 1, 16, 200), "n": (48, 18)}  # 200 rows are two tiles
POINTER, MAYBE = ("plain", "shifted", "other"), ("plain", None, "shifted", "other")


# A call of each launcher; what its arguments are is in LAUNCHERS.
def by_tensor(dtype, target, layouts, power, scaled, amax, counts, total, m, n, **view):
    kernels.per_tensor(
        *(matrix(m, n, dtype, **view), torch.ones(()) if scaled else None, target, *layouts, power),
        *(torch.zeros(()) if amax else None, vector(3, counts, torch.int64), vector(n, total)),
    )


def by_pair(dtype, w_dtype, target, columnwise, w_columnwise, amax, w_amax, w_offset, w_stride, rows, m, n, **view):
    x, w = matrix(m, n, dtype, **view), matrix(rows, n, w_dtype, w_offset, w_stride)
    given, w_given = (torch.zeros(()) if wanted else None for wanted in (amax, w_amax))
    kernels.pair(x, torch.ones(()), given, w, torch.ones(()), w_given, target, columnwise, w_columnwise)


def by_row(dtype, target, layouts, power, counts, m, n, **view):
    fine_kernels.per_row(matrix(m, n, dtype, **view), target, *layouts, power, vector(3, counts, torch.int64))


def by_block(dtype, target, rows, layouts, power, counts, m, n, **view):
    x = matrix(m, n, dtype, **view)
    fine_kernels.per_block(x, target, rows, *layouts, power, vector(3, counts, torch.int64))


def norm_forward(dtype, weight, bias, eps, centred, kind, m, n, **view):
    norm.forward(matrix(m, n, dtype, **view), vector(n, weight), vector(n, bias), eps, centred, kind)


def norm_quantized(dtype, weight, bias, eps, centred, kind, scale, target, layouts, amax, counts, m, n, **view):
    residual_kernels.add_forward(
        *(matrix(m, n, dtype, **view), None, vector(n, weight), vector(n, bias), eps, centred, kind, dtype),
        *(vector(1, scale), target, *layouts, vector(1, amax), vector(3, counts, torch.int64)),
    )


def norm_quantized_again(mean, rstd, m):
    """By an earlier call's statistics."""
    residual_kernels.add_forward(
        *(matrix(m, 2048, stride=2048), None, torch.ones(2048), None, 1e-5, False, "layernorm", BF16, torch.ones(())),
        *(E4M3, True, True),
        statistics=(vector(m, mean), vector(m, rstd)),
    )


def norm_backward(dtype, dy_dtype, dy_offset, dy_stride, weight, mean, rstd, residual, centred, m, n, **view):
    dy, x = matrix(m, n, dy_dtype, dy_offset, dy_stride), matrix(m, n, dtype, **view)
    other = None if residual is None else matrix(m, n, **residual)
    norm.backward(dy, x, vector(n, weight), vector(m, mean), vector(m, rstd), centred, other)


def activation_forward(dtype, kind, m, n, **view):
    activation.forward(matrix(m, n, dtype, **view), kind)


def activation_quantized(dtype, kind, scale, target, layouts, amax, counts, m, n, **view):
    activation.forward_quantized(
        *(matrix(m, n, dtype, **view), kind, vector(1, scale), target, *layouts),
        *(vector(1, amax), vector(3, counts, torch.int64)),
    )


def activation_backward(dtype, kind, dy_dtype, dy_offset, dy_stride, m, n, **view):
    f = n // 2 if activation.KINDS[kind][1] else n
    activation.backward(matrix(m, f, dy_dtype, dy_offset, dy_stride), matrix(m, n, dtype, **view), kind)


def activation_backward_quantized(
    dtype, kind, dy_dtype, dy_offset, dy_stride, scale, target, layouts, amax, counts, total, m, n, **view
):
    f = n // 2 if activation.KINDS[kind][1] else n
    activation.backward_quantized(
        *(matrix(m, f, dy_dtype, dy_offset, dy_stride), matrix(m, n, dtype, **view), kind, vector(1, scale), target),
        *(*layouts, vector(1, amax), vector(3, counts, torch.int64), vector(n, total)),
    )


def rotated(dtype, width, parts, copied, in_place, interleaved, transposed, heads, d, angles, m, offset, stride):
    """One to three parts of m positions, the last with angles of its own place, or copied."""

    def heads_of(number: int, offset: int = 0) -> Tensor:
        room = torch.zeros(offset + m * stride + 72, dtype=dtype)
        return room.as_strided((m, 2, 1, number, d), (stride, 0, 0, d, 1), offset)

    x = [heads_of(number, offset) for number in (heads, 2, 1)[:parts]]
    out = x if in_place else [heads_of(t.shape[3]) for t in x]
    at = [matrix(m, width, FP32, *place) for place in ((0, 48), (0, 48), angles)][:parts]
    rotary.rotate(
        [Rotated(*given) for given in zip(x, out, [*at[:-1], None if copied else at[-1]], strict=True)],
        interleaved,
        transposed,
    )


def history(length, slots, modules, margin, algorithm):
    states = [(torch.zeros(length, slots), *(torch.ones(slots) for _ in range(3))) for _ in range(modules)]
    _history.launch(states, margin, algorithm)


def heads_of(dtype, heads, kv_heads, rows, keys, d, dv, offset, last):
    """q, k, v and out's like, of two batches; q `offset` elements behind a multiple of 16 bytes, its rows `last` longer."""

    def tensor(number: int, length: int, features: int, offset: int = 0, last: int = 0) -> Tensor:
        steps = (number * length * (features + last), length * (features + last), features + last, 1)
        room = torch.zeros(2 * steps[0] + offset, dtype=dtype)
        return room.as_strided((2, number, length, features), steps, offset)

    kv = min(heads, kv_heads)
    return tensor(heads, rows, d, offset, last), tensor(kv, keys, d), tensor(kv, keys, dv), tensor(heads, rows, dv)


def extent_of(q, k, left, right, mask):
    """Of a mask of uint8, the same for all rows ("keys") or any ("scores"), its address "odd"."""
    if mask is None:
        return Extent(left, right, None)
    shape = (1, 1, 1, k.shape[2]) if mask == "keys" else (2, 1, q.shape[2], k.shape[2])
    values = torch.zeros(1 + int(np.prod(shape)), dtype=torch.uint8)[int(mask == "odd") :][: int(np.prod(shape))]
    return Extent(left, right, values.view(shape).expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2]))


def attention_forward(left, right, mask, dropout, **shape):
    q, k, v, _ = heads_of(**shape)
    seed = torch.zeros(2, dtype=torch.int64) if dropout else None
    attention_kernels.forward(q, k, v, extent_of(q, k, left, right, mask), 0.5, dropout, seed)


def attention_backward(left, right, mask, dropout, **shape):
    q, k, v, out = heads_of(**shape)
    seed, lse = torch.zeros(2, dtype=torch.int64) if dropout else None, torch.zeros(out.shape[:3])
    extent = extent_of(q, k, left, right, mask)
    attended = attention_backward_kernels.Attended(q, k, v, out, lse, seed)
    attention_backward_kernels.backward(attended, out, extent, 0.5, dropout)


def attention_fp8(causal, keep, **shape):
    """The casts, the forward pass and the backward pass."""
    q, k, v, out = heads_of(**shape)
    cast = fp8_quantize.quantize(q, k, v, keep=True)
    fp8_quantize.quantize(q, k, v, keep=keep)
    lse, gradients = torch.zeros(out.shape[:3]), (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v))
    fp8_forward.forward(torch.empty_like(out), lse, cast, k.shape[2], causal, 0.5)
    fp8_backward.backward(gradients, out, q, k, out, lse, cast, causal, 0.5)


def row_losses(dtype, padded, vocab, gradient, offset):
    targets, losses = (torch.zeros(4 + offset, dtype=kind)[offset:] for kind in (torch.int64, FP32))
    factor = torch.zeros(()) if gradient else None
    cross_entropy.rows(matrix(4, padded, dtype, offset, padded), targets, losses, min(vocab, padded), factor)


def row_losses_in_fp8(number, padded, first, height, layouts, offset):
    data, data_t = (
        torch.zeros(m * n + offset, dtype=E5M2)[offset:].view(m, n) if wanted else None
        for wanted, m, n in zip(layouts, (number, padded), (padded, height), strict=True)
    )
    targets, logits = torch.zeros(number, dtype=torch.int64), matrix(number, padded, BF16, offset, padded)
    cross_entropy.fp8_rows(logits, targets, torch.zeros(number), padded, data, data_t, first)


def mean_of_losses(number, offset):
    targets, losses = (torch.zeros(number + offset, dtype=kind)[offset:] for kind in (torch.int64, FP32))
    cross_entropy.mean(losses, cross_entropy.count(targets))


def scaled_gradient(number, offset, dtype):
    x = torch.zeros(number + offset)[offset:]
    cross_entropy.scale(x, torch.ones(()), x if dtype is None else torch.zeros(number, dtype=dtype))


FLOATS, TARGETS, BOTH = (BF16, FP16, FP32), (E4M3, E5M2), (True, False)
COUNTS, SUM = ("plain", None), (None, "plain")  # checked for their dtype, and not specialised on their alignment
GRADIENT = {"dy_dtype": (BF16, FP32), "dy_offset": (0, 1), "dy_stride": (48, 49)}
CAST = {"scale": POINTER, "target": TARGETS, "layouts": LAYOUTS, "amax": MAYBE, "counts": MAYBE}
KINDS = {"kind": ("gelu", "geglu", "silu", "swiglu")}
NORM = {
    "weight": POINTER,
    "bias": MAYBE,
    "eps": (1e-5, 0, 1, np.float64(0.1)),
    "centred": BOTH,
    "kind": ("layernorm", "rmsnorm"),
}
RESIDUALS = ({}, None, {"dtype": FP32}, {"offset": 1}, {"stride": 49})
TENSOR = {"target": TARGETS, "power": BOTH, "layouts": LAYOUTS, "counts": COUNTS}
PAIR = {
    "w_dtype": (BF16, FP16), "target": TARGETS, "columnwise": BOTH, "w_columnwise": BOTH, "amax": BOTH, "w_amax": BOTH,
    "w_offset": (0, 1), "w_stride": (48, 49), "rows": (19, 32),
}  # fmt: skip
HEADS = {
    "dtype": (BF16, FP16), "heads": (4, 2, 1), "kv_heads": (4, 2, 1), "rows": (130, 128, 17), "keys": (130, 128, 16, 1),
    "d": (64, 40), "dv": (64, 24), "offset": (0, 1, 8), "last": (0, 8, 1),
}  # fmt: skip
SEEN = {"left": (-1, 5), "right": (-1, 0, 16), "mask": (None, "keys", "scores", "odd"), "dropout": (0.0, 0.1)}
LAUNCHERS: dict[Callable[..., None], dict[str, tuple[Any, ...]]] = {
    attention_forward: {**HEADS, **SEEN},
    attention_backward: {**HEADS, **SEEN},
    attention_fp8: {**HEADS, "causal": BOTH, "keep": BOTH},
    by_tensor: {"dtype": FLOATS, **TENSOR, "scaled": (False, True), "amax": BOTH, "total": SUM, **VIEW},
    by_pair: {"dtype": (BF16, FP16), **PAIR, **VIEW},
    by_row: {"dtype": FLOATS, **TENSOR, **VIEW},
    by_block: {"dtype": FLOATS, "rows": (128, 1), **TENSOR, **VIEW},
    norm_forward: {"dtype": FLOATS, **NORM, **VIEW},
    norm_quantized: {"dtype": (BF16, FP16), **NORM, **CAST, **VIEW},
    norm_quantized_again: {"mean": POINTER, "rstd": POINTER, "m": (18, 2, 16, 200)},
    norm_backward: {
        "dtype": FLOATS, **GRADIENT, "weight": POINTER, "mean": MAYBE, "rstd": POINTER, "residual": RESIDUALS,
        "centred": BOTH, **VIEW,
    },
    activation_forward: {"dtype": FLOATS, **KINDS, **VIEW},
    activation_quantized: {"dtype": FLOATS, **KINDS, **CAST, **VIEW},
    activation_backward: {"dtype": FLOATS, **KINDS, **GRADIENT, **VIEW},
    activation_backward_quantized: {"dtype": FLOATS, **KINDS, **GRADIENT, **CAST, "total": SUM, **VIEW},
    rotated: {
        "dtype": FLOATS, "width": (12, 8), "parts": (3, 2), "copied": (False, True), "in_place": (False, True),
        "interleaved": BOTH, "transposed": BOTH, "heads": (2, 1, 3), "d": (16, 24), "angles": ((0, 48), (1, 48), (0, 50)),
        "m": (17, 1, 16, 200), "offset": (0, 1, 8), "stride": (48, 49, 64),
    },
    history: {
        "length": (16, 1, 100), "slots": (3, 48), "modules": (1, 2), "margin": (0, 1, np.float64(2.5)),
        "algorithm": ("max", "most_recent"),
    },
    row_losses: {
        "dtype": FLOATS, "padded": (48, 50, 1), "vocab": (48, 32, 1), "gradient": BOTH, "offset": (0, 1, 8),
    },
    row_losses_in_fp8: {
        "number": (17, 1, 16), "padded": (48, 50, 1), "first": (0, 1, 16), "height": (48, 33),
        "layouts": (*LAYOUTS, (False, False)), "offset": (0, 1, 16),
    },
    mean_of_losses: {"number": (17, 1, 16, 48), "offset": (0, 1, 16)},
    scaled_gradient: {"number": (17, 1, 16, 48), "offset": (0, 1, 16), "dtype": (None, *FLOATS)},
}  # fmt: skip


def variants(options: dict[str, tuple[Any, ...]]) -> Iterator[dict[str, Any]]:
    """Every two options in all their combinations, the others as they come first."""
    usual = {name: values[0] for name, values in options.items()}
    for names in itertools.combinations(options, 2):
        for values in itertools.product(*(options[name] for name in names)):
            yield usual | dict(zip(names, values, strict=True))


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda launcher: launcher.__name__)
def test_what_triton_compiles_apart_has_keys_of_its_own(launcher: Callable[..., None], recorder: Recorder) -> None:
    for variant in variants(LAUNCHERS[launcher]):
        recorder.of(launcher, variant)


def test_a_grid_is_no_higher_than_cuda_s(recorder: Recorder) -> None:
    """2^20 rows by 16 a program, and 2^22 or 2^23 elements by 64 or 128: pages that nobody touches."""
    x, parameters = torch.empty(2**20, 8, dtype=BF16), {"kind": "gelu"}
    assert len(recorder.of(partial(activation.forward, x), parameters)) == 2
    assert len(recorder.of(partial(activation.backward, x, x, y=torch.empty_like(x)), parameters)) == 2
    for name, k in (("e2m1", 2**22), ("e4m3", 2**23)):
        recorder.of(partial(packing.packed, torch.empty(1, k, dtype=BF16)), {"name": name})


def cases(m: int, device: str) -> dict[str, Callable[[], Any]]:
    x, dy, residual = (torch.randn(m, 96, dtype=BF16, device=device) for _ in range(3))
    weight, bias = (torch.randn(96, dtype=BF16, device=device) for _ in range(2))
    scale, mean, rstd = torch.tensor(3.0, device=device), *torch.rand(2, m, device=device)
    cast = {"scale": scale, "dtype": E4M3, "rowwise": True, "columnwise": True}
    both = {"rowwise": True, "columnwise": True}
    heads, angles = x.view(m, 2, 1, 3, 16), torch.randn(m, 12, device=device)

    def turned() -> Tensor:
        out = torch.zeros_like(heads)
        rotary.rotate([Rotated(heads, out, angles)], False, False)
        return out

    return {
        "rotary": turned,
        "scaled": lambda: quantize_triton.quantize(x, E4M3, scale=scale, **both),
        **{name: partial(quantize_triton.quantize, x, E4M3, block, **both) for name, block in BLOCKS.items()},
        "norm": lambda: norm_triton.forward(x, weight, bias, Norm(1e-5)),
        "norm, quantized": lambda: norm_triton.forward_quantized(x, weight, bias, Norm(1e-5), **cast),
        "norm, backward": lambda: norm_triton.backward(dy, x, weight, mean, rstd, Norm(1e-5), residual),
        "activation": lambda: activation_triton.forward(x, "gelu"),
        "activation, quantized": lambda: activation_triton.forward_quantized(x, "gelu", **cast),
        "activation, backward": lambda: activation_triton.backward(dy, x, "gelu"),
        "activation, backward, quantized": lambda: activation_triton.backward_quantized(dy, x, "gelu", **cast),
    }


def tensors(result: Any) -> list[Tensor]:
    """All there are in a result, as what can be compared."""
    if isinstance(result, Tensor):
        return [result.float()]
    return [tensor for part in result for tensor in tensors(part)] if isinstance(result, tuple | list) else []


@pytest.mark.gpu
@pytest.mark.parametrize("name", cases(1, "cpu"))
def test_a_launch_by_key_computes_what_tritons_does(name: str) -> None:
    first, second = cases(33, "cuda")[name], cases(33, "cuda")[name]
    first()
    kept = len(_launch._compiled)
    assert kept > 0
    by_key = tensors(second())
    assert len(_launch._compiled) == kept
    _launch.forget()
    by_triton = tensors(second())
    assert by_key
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(by_key, by_triton, strict=True))
