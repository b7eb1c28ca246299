"""Our Triton attention beyond the contract: windows, dropout, logarithms of sums, layouts, odd sizes, operators."""

import math
from collections.abc import Callable

import pytest
import torch
import triton as triton_package
from test_contract import a_problem, by_definition, gradients, largest
from torch import Tensor

from te_bench.kernels import architecture, attention
from te_bench.kernels.attention.backends import triton as ours
from te_bench.kernels.attention.portable import backward
from te_bench.kernels.attention.portable import forward as _kernels
from te_bench.kernels.attention.portable.backward import Attended
from te_bench.kernels.attention.portable.forward import Extent
from te_bench.kernels.attention.portable.launch import Tile

INTERPRETED = triton_package.knobs.runtime.interpret
#: Where the kernels run: in the interpreter, in float32, or on the GPU.
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
#: Relative to the largest element: float32's sums of some dozen terms; bf16's weights and outputs rounded.
TOLERANCE = {"cpu": 2e-6, "cuda": 2e-2}


def drawn(device: str, *sizes: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    return [torch.randn(size, generator=generator).to(device, dtype) for size in sizes]


def masked(hidden: Tensor) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Attention by definition, of weights that are 0 where hidden, and rows of zeros where all are."""

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        scores = (q @ k.mT / math.sqrt(q.shape[3])).masked_fill(hidden, -math.inf)
        top = scores.amax(-1, keepdim=True).clamp(min=-1e300).detach()
        weights = (scores - top).exp()
        return weights / weights.sum(-1, keepdim=True).clamp(min=1e-300) @ v

    return forward


def assert_close(got: list[Tensor], exact: list[Tensor], device: str) -> None:
    for name, value, truth in zip(("out", "dq", "dk", "dv"), got, exact, strict=True):
        assert largest(value.double() - truth) <= TOLERANCE[device] * max(1.0, largest(truth)), name


def band(rows: int, keys: int, left: int, right: int) -> Tensor:
    """What a window hides."""
    ahead = torch.arange(keys) - torch.arange(rows)[:, None]
    hidden = torch.zeros(rows, keys, dtype=torch.bool)
    hidden |= ahead > right if right >= 0 else False
    return hidden | (ahead < -left if left >= 0 else torch.zeros_like(hidden))


#: At (5, 1), (-1, 1) and (3, 65) the last row of a tile sees one key of the next block and no other.
ENDS = [(0, 0), (70, 0), (150, 10), (200, 200), (2**31 - 1, 2**40), (5, 1), (-1, 1)]
EVERYWHERE = [(5, 3), (40, -1), (-1, 9), (3, 65)]
WINDOWED = [
    *((150, 150, window) for window in (*ENDS, *EVERYWHERE)),
    *((*sizes, window) for sizes in ((256, 256), (70, 130), (130, 40)) for window in EVERYWHERE),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("rows", "keys", "window"), WINDOWED, ids=str)
def test_windows(rows: int, keys: int, window: tuple[int, int], device: str) -> None:
    """Row i sees keys i - left to i + right; rows far beyond the last key see none."""
    tensors = drawn(device, (1, 2, rows, 16), (1, 1, keys, 16), (1, 1, keys, 16), (1, 2, rows, 16))
    got = gradients(lambda q, k, v: ours.attention(q, k, v, scale=0.25, window=window)[0], tensors)
    hidden = band(rows, keys, *window).to(device)
    assert_close(got, gradients(masked(hidden), tensors, torch.float64), device)
    assert not got[0].transpose(1, 2)[:, hidden.all(-1)].any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", ["mask", "window"])
def test_what_comes_back_to_a_row_that_sees_no_key_goes_nowhere_not_even_infinities(case: str, device: str) -> None:
    """The kernels say so to `attend`, which gives them such rows as they are."""
    tensors = drawn(device, (1, 2, 60, 16), (1, 2, 40, 16), (1, 2, 40, 16), (1, 2, 60, 16))
    window, mask, dead = None, None, torch.arange(60, device=device) > 49
    if case == "mask":
        mask = (torch.arange(60, device=device) > 49)[:, None].expand(60, 40)
    else:
        window = (10, 0)  # row 50 would see keys 40 to 50, of which there are 40
    backend = attention.load("triton")
    assert backend.windows

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention.attend(backend, q, k, v, causal=False, scale=0.25, mask=mask, window=window)

    finite = gradients(forward, tensors)
    tensors[3][:, :, dead] = math.inf
    out, dq, dk, dv = gradients(forward, tensors)
    assert not out[:, :, dead].any()
    assert not dq[:, :, dead].any()
    assert out[:, :, ~dead].any(-1).all()
    for value, before in zip((dq, dk, dv), finite[1:], strict=True):
        assert torch.equal(value, before)
        assert value.isfinite().all()


@pytest.mark.gpu
def test_a_window_needs_no_memory_for_a_mask() -> None:
    q, k, v, dout = (torch.randn(1, 2, 32768, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    gradients(
        lambda *x: attention.attend(attention.load("triton"), *x, causal=True, scale=0.125, window=(255, 0)),
        [q, k, v, dout],
    )
    assert torch.cuda.max_memory_allocated() - before < 2**28  # 32768^2 bytes are 2^30


@pytest.mark.parametrize("device", DEVICES)
def test_the_logarithm_of_each_rows_sum(device: str) -> None:
    q, k, v = drawn(device, (2, 2, 70, 32), (2, 2, 90, 32), (2, 2, 90, 32))
    mask = torch.zeros(70, 90, dtype=torch.bool, device=device)
    mask[3] = True
    out, lse = ours.attention(q, k, v, scale=0.3, mask=mask)
    exact = (0.3 * q.double() @ k.double().mT).masked_fill(mask, -math.inf).logsumexp(-1)
    assert lse.dtype is torch.float32
    assert (lse[:, :, 3] == -math.inf).all()
    assert not out[:, :, 3].any()
    live = [i for i in range(70) if i != 3]
    torch.testing.assert_close(lse[:, :, live].double(), exact[:, :, live], rtol=1e-5, atol=1e-5)


# Layouts, sizes, values


@pytest.mark.parametrize("device", DEVICES)
def test_views_of_one_qkv_tensor(device: str) -> None:
    """As GPT passes them; the gradients keep the inputs' order in memory, and out has the projection's."""
    (qkv,) = drawn(device, (2, 40, 3 * 4 * 16))
    q, k, v = (x.view(2, 40, 4, 16).transpose(1, 2) for x in qkv.split(64, 2))
    (dout,) = drawn(device, (2, 40, 4, 16), seed=1)
    views = [q, k, v, dout.transpose(1, 2)]
    got = gradients(lambda *x: ours.forward(*x, causal=True, scale=0.25), views)
    again = gradients(lambda *x: ours.forward(*x, causal=True, scale=0.25), [x.contiguous() for x in views])
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
    for x in got:
        assert x.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("device", DEVICES)
def test_strides_of_every_kind(device: str) -> None:
    """Heads that are broadcast, features apart from one another, rows with gaps, a gradient that is one number."""
    wide = drawn(device, (2, 3, 34, 40))[0]
    q = wide[:, :, 1:, 3:35]
    k = drawn(device, (2, 3, 32, 33), seed=1)[0].mT
    v = drawn(device, (2, 1, 33, 32), seed=2)[0].expand(2, 3, 33, 32)
    dout = drawn(device, (1, 1, 1, 1), seed=3)[0].expand(2, 3, 33, 32)
    got = gradients(lambda *x: ours.forward(*x, causal=True, scale=1 / math.sqrt(32)), [q, k, v, dout])
    exact = gradients(masked(band(33, 33, -1, 0).to(device)), [q, k, v, dout], torch.float64)
    assert_close(got, exact, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("head_dims", [(1, 1), (8, 8), (24, 40), (80, 80), (96, 160), (256, 256)], ids=str)
def test_widths_that_are_no_powers_of_two(head_dims: tuple[int, int], device: str) -> None:
    d, dv = head_dims
    problem = a_problem((1, 2, 37, d), "fp32" if device == "cpu" else "bf16", device, v_head_dim=dv)
    assert attention.load("triton").unsupported(problem) is None
    tensors = drawn(device, (1, 2, 37, d), (1, 2, 37, d), (1, 2, 37, dv), (1, 2, 37, dv))
    got = gradients(lambda *x: ours.forward(*x, causal=True, scale=1 / math.sqrt(d)), tensors)
    assert_close(got, by_definition(problem, tensors), device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("batch", "rows", "keys"), [(0, 5, 5), (2, 0, 5), (2, 5, 0), (2, 1, 1)])
def test_empty_and_least_sizes(batch: int, rows: int, keys: int, device: str) -> None:
    sizes = (batch, 2, rows, 16), (batch, 2, keys, 16), (batch, 2, keys, 8), (batch, 2, rows, 8)
    tensors = drawn(device, *sizes)
    out, *grads = gradients(lambda *x: ours.forward(*x, causal=True, scale=1.0), tensors)
    assert out.shape == sizes[3]
    assert [g.shape for g in grads] == list(sizes[:3])
    if rows == keys == 1:
        torch.testing.assert_close(out, tensors[2])
    else:
        assert not any(x.any() for x in (out, *grads))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scale", [-0.7, 0.0])
def test_scales_that_are_not_positive(scale: float, device: str) -> None:
    tensors = drawn(device, *[(1, 2, 40, 16)] * 4)
    tensors[0] = tensors[0] * 20  # the wrong maximum would overflow
    got = gradients(lambda *x: ours.forward(*x, causal=False, scale=scale), tensors)

    def definition(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (scale * q @ k.mT).softmax(-1) @ v

    exact = gradients(definition, tensors, torch.float64)
    for value, truth in zip(got, exact, strict=True):  # scores of 100 in float32
        assert largest(value - truth) <= (1e-4 if device == "cpu" else 0.1) * max(1.0, largest(truth))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_values_that_are_not_finite_reach_the_rows_that_see_them(which: str, bad: float, device: str) -> None:
    tensors = drawn(device, *[(1, 1, 70, 16)] * 3)
    tensors["qkv".index(which)][0, 0, 66, 5] = bad
    out = ours.forward(*tensors, causal=True, scale=0.25)
    exact = attention.load("manual").forward(*(x.double() for x in tensors), causal=True, scale=0.25)
    seeing = slice(66, 67) if which == "q" else slice(66, None)
    assert torch.equal(out[0, 0, seeing].isfinite(), exact[0, 0, seeing].isfinite())
    assert torch.equal(out[0, 0, seeing].isnan(), exact[0, 0, seeing].isnan())
    assert (out.isfinite() | ~exact.isfinite()).all()


#: Rows, keys, heads of keys, window, mask.
WITH_INFINITE_KEYS: dict[str, tuple[int, int, int, tuple[int, int], str]] = {
    "full": (100, 100, 2, (-1, -1), ""),
    "causal": (100, 100, 2, (-1, 0), ""),
    "shared heads": (100, 100, 1, (-1, 0), ""),
    "window": (150, 150, 2, (40, 3), ""),
    "no left end": (150, 150, 2, (-1, 3), ""),
    "keys that no row sees": (100, 190, 2, (-1, 0), ""),
    "fewer rows than a tile": (5, 100, 2, (-1, -1), ""),
    "padding": (100, 100, 2, (-1, -1), "keys"),
    "any mask": (100, 100, 2, (-1, -1), "scores"),
    "any mask, window": (100, 100, 1, (40, 0), "scores"),
}


def with_infinite_keys(tensors: list[Tensor]) -> list[Tensor]:
    """Rows by heads: of every 7th key, the first not among them, all scores are -inf, by one feature or another."""
    q, k, v, dout = tensors
    q[..., 5], q[..., 9] = q[..., 5].abs() + 0.1, -q[..., 9].abs() - 0.1
    k[..., 3::14, :, 5] = -math.inf
    k[..., 10::14, :, 9] = math.inf
    return [q, k, v, dout]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.parametrize("case", WITH_INFINITE_KEYS)
def test_a_key_of_no_weight_has_gradients_of_0_whatever_it_holds(case: str, device: str) -> None:
    """Tiles of 64 and of 32 rows end beyond the last one."""
    rows, keys, kv_heads, window, kind = WITH_INFINITE_KEYS[case]
    sizes = [(1, heads, n, 16) for heads, n in ((2, rows), (kv_heads, keys), (kv_heads, keys), (2, rows))]
    tensors = [x.transpose(1, 2) for x in with_infinite_keys([x.transpose(1, 2) for x in drawn(device, *sizes)])]
    drop = torch.rand(1, 2, rows, keys, generator=torch.Generator().manual_seed(1)) < 0.3
    if "no row sees" in case:
        tensors[1][:, :, rows:] = math.inf
    mask = {"keys": drop[:, :1, :1], "scores": drop, "": torch.zeros(1, 1, 1, 1, dtype=torch.bool)}[kind].to(device)
    hidden = mask | band(rows, keys, *window).to(device)
    _, _, *exact = gradients(masked(hidden), tensors, torch.float64)
    assert all(x.isfinite().all() for x in exact)
    assert not any(x[:, :, 3::7].any() for x in exact)
    q, k, v, dout = tensors
    extent = Extent(*window, mask.view(torch.uint8).expand(1, 2, rows, keys) if kind else None)
    out, lse = _kernels.forward(q, k, v, extent, 0.25, 0.0, None)
    for of_keys in (Tile(64, 32, 4, 1), Tile(32, 64, 4, 1)):
        tiles = Tile(32, 64, 4, 1), of_keys
        _, *made = backward.backward(Attended(q, k, v, out, lse, None), dout, extent, 0.25, 0.0, tiles=tiles)
        for value, truth in zip(made, exact, strict=True):
            assert largest(value - truth) <= TOLERANCE[device] * max(1.0, largest(truth))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_rows_whose_scores_begin_with_minus_infinity(causal: bool, device: str) -> None:
    """Of more than a block of keys; where no other is seen the row is NaN, as softmax has it."""
    q, k, v, dout = drawn(device, *[(1, 2, 200, 16)] * 4)
    q[..., 5] = q[..., 5].abs() + 0.1
    k[:, :, :130, 5] = -math.inf
    tensors = [q, k, v, dout]
    made = gradients(lambda q, k, v: ours.forward(q, k, v, causal=causal, scale=0.25), tensors)
    exact = gradients(
        lambda *x: attention.load("manual").forward(*x, causal=causal, scale=0.25), tensors, torch.float64
    )
    assert exact[0][:, :, :130].isnan().all() if causal else exact[0].isfinite().all()
    assert exact[0][:, :, 130:].isfinite().all()
    for name, value, truth in zip(("out", "dq", "dk", "dv"), made, exact, strict=True):
        if causal and name in ("dk", "dv"):  # of keys that no such row sees manual has 0 x NaN as well
            value, truth = value[:, :, :130], truth[:, :, :130]
        torch.testing.assert_close(value.double(), truth, atol=2 * TOLERANCE[device], rtol=0, equal_nan=True, msg=name)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width", [16, 64, 128])
def test_gradients_are_those_of_the_definition_whatever_the_tiles(width: int, device: str) -> None:
    """On whole blocks and on parts of some."""
    for rows, keys in ((128, 128), (130, 70)):
        sizes = (1, 2, rows, width), (1, 1, keys, width), (1, 1, keys, width), (1, 2, rows, width)
        q, k, v, dout = tensors = drawn(device, *sizes)
        extent, scale = Extent(-1, 0, None), 1 / math.sqrt(width)
        exact = gradients(masked(band(rows, keys, -1, 0).to(device)), tensors, torch.float64)
        out, lse = _kernels.forward(q, k, v, extent, scale, 0.0, None)
        for of_keys in (Tile(64, 32, 4, 1), Tile(32, 64, 4, 1)):
            tiles = Tile(32, 64, 4, 1), of_keys
            made = backward.backward(Attended(q, k, v, out, lse, None), dout, extent, scale, 0.0, tiles=tiles)
            assert_close([out, *made], exact, device)


# What only a GPU can show


@pytest.mark.gpu
def test_gradients_repeat_bit_for_bit() -> None:
    tensors = [torch.randn(4, 6, 1000, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4)]

    def forward(*x: Tensor) -> Tensor:
        return ours.attention(*x, causal=True, scale=0.125)[0]

    first, *others = [gradients(forward, tensors) for _ in range(5)]
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


@pytest.mark.gpu
def test_a_captured_graph_drops_anew_at_each_replay() -> None:
    q, k, v = (torch.randn(2, 2, 256, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))

    def call() -> Tensor:
        return ours.forward(q, k, v, causal=True, scale=0.125, dropout=0.5)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    made = []
    for _ in range(2):
        graph.replay()
        made.append(out.clone())
    assert not torch.equal(*made)


@pytest.mark.gpu
def test_more_elements_than_32_bits_count() -> None:
    """The last head of 2^31 + 2^20 elements, of a tensor whose rows are far apart, too."""
    q = torch.randn(1, 1025, 32768, 64, device="cuda", dtype=torch.bfloat16)
    out = ours.forward(q, q, q, causal=True, scale=0.125)
    alone = q[:, -1:].contiguous()
    assert torch.equal(out[:, -1:], ours.forward(alone, alone, alone, causal=True, scale=0.125))
    del out, alone
    apart = torch.randn(70000, 32768, device="cuda", dtype=torch.bfloat16)[:, :64].view(1, 1, 70000, 64)
    near = apart.contiguous()
    out = ours.forward(apart, apart, apart, causal=True, scale=0.125)
    assert torch.equal(out, ours.forward(near, near, near, causal=True, scale=0.125))


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.parametrize("name", ["triton", "triton_fp8"])
def test_rows_further_apart_than_a_tile_s_32_bits_count(name: str) -> None:
    """4.4 GB of addresses, of which 130 pages are touched."""
    generator = torch.Generator().manual_seed(0)
    near = torch.randn(1, 1, 130, 16, generator=generator).bfloat16()
    apart = 17 << 20
    far = torch.empty(130 * apart, dtype=torch.bfloat16).as_strided(near.shape, (0, 0, apart, 1))
    far.copy_(near)
    attend = attention.load(name).forward
    found = []
    for given in (near, far):
        leaf = given.detach().requires_grad_()
        out = attend(leaf, leaf, leaf, causal=True, scale=0.25)
        out.backward(given)
        found.append((out.detach(), leaf.grad))
    for mine, theirs in zip(*found, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
@pytest.mark.filterwarnings("error:divide by zero:RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.parametrize("name", ["triton", "triton_fp8"])
def test_an_l2_that_holds_more_heads_than_32_bits_count(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """2^30 or 2^29 heads by 4 or 8 tiles make 2^32; so do 32 heads of 64 with 262,144 rows and one key on an H200."""
    tensors = [torch.randn(1, 2, rows, 16).bfloat16() for rows in (512, 64, 64, 512)]
    attend, found = attention.load(name).forward, []
    for size in (2**20, 5 * 2**40):
        monkeypatch.setattr(architecture, "l2_bytes", lambda device, size=size: size)
        leaves = [t.detach().requires_grad_() for t in tensors[:3]]
        out = attend(*leaves, causal=False, scale=0.25)
        found.append([out.detach(), *torch.autograd.grad(out, leaves, tensors[3])])
    for mine, theirs in zip(*found, strict=True):
        assert torch.equal(mine, theirs)
