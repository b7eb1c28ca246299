"""Rotary kernels by the rule error <= 2 x torch's at the same dtype + floor against complex multiplication in float64."""

import functools
from fractions import Fraction

import kernel_checks
import pytest
import torch
from kernel_checks import DEVICES, FLOATS, assert_as_good, of_copy
from torch import Tensor

from te_bench.kernels import rotary
from te_bench.kernels.rotary import Rotated, kernels
from te_bench.kernels.rotary.backends import reference

#: T, B, G, query heads a group, D, how many of D turn
SHAPES = [(5, 2, 1, 3, 8, 8), (70, 1, 1, 2, 64, 64), (3, 2, 5, 1, 20, 12), (1, 3, 2, 2, 16, 6), (9, 1, 1, 17, 7, 2)]


supported = functools.partial(kernel_checks.supported, rotary, dtype="fp32")


def mixed_parts(
    shape: tuple[int, ...], dtype: torch.dtype, device: str, batch_first: bool = False
) -> tuple[Tensor, list[Tensor]]:
    """(T, B, F) or (B, T, F) as a projection leaves it, and its views q, k, v (T, B, G, R, D), by groups."""
    t, b, g, r, d, _ = shape
    generator = torch.Generator().manual_seed(sum(shape))
    outer = (b, t) if batch_first else (t, b)
    mixed = torch.randn(*outer, g * (r + 2) * d, generator=generator).to(device, dtype)
    return mixed, views(mixed, shape, batch_first)


def views(mixed: Tensor, shape: tuple[int, ...], batch_first: bool = False) -> list[Tensor]:
    _, _, g, r, d, _ = shape
    grouped = mixed.transpose(0, 1) if batch_first else mixed
    q, k, v = grouped.unflatten(2, (g, r + 2, d)).split((r, 1, 1), 3)
    return [q, k, v]


def draw_angles(t: int, d: int, device: str, farthest: float = 40.0) -> Tensor:
    """(t, d): a rotation's, whatever the pairs are, has the same number throughout a row's pair; so these have not."""
    return (torch.rand(t, d, generator=torch.Generator().manual_seed(t * d)) * 2 * farthest - farthest).to(device)


def exact(x: Tensor, angles: Tensor, interleaved: bool, transposed: bool) -> Tensor:
    """By the matrix of the pairs, in float64: each column of it is the image of a feature."""
    x, a = x.double().cpu(), angles[: len(x)].double().cpu()
    d = a.shape[1]
    pairs = [(2 * i, 2 * i + 1) if interleaved else (i, i + d // 2) for i in range(d // 2)]
    matrix = torch.eye(x.shape[-1], dtype=torch.float64).repeat(len(x), 1, 1)  # (T, to, from)
    for i, j in pairs:
        matrix[:, i, i], matrix[:, i, j] = a[:, i].cos(), -a[:, i].sin()
        matrix[:, j, j], matrix[:, j, i] = a[:, j].cos(), a[:, j].sin()
    matrix = matrix.transpose(1, 2) if transposed else matrix
    return torch.einsum("tij,tbgrj->tbgri", matrix, x)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("transposed", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [*((shape, dtype) for shape in SHAPES for dtype in ("fp32", "bf16")), (SHAPES[0], "fp16")],
    ids=str,
)
@pytest.mark.parametrize("name", rotary.names())
def test_contract(name, shape, dtype, interleaved, transposed, device):
    """Into another tensor, v copied beside; each of q and k by angles of its own."""
    backend = supported(name, device, dtype=dtype)
    _, (q, k, v) = mixed_parts(shape, FLOATS[dtype], device, batch_first=interleaved)
    angles = draw_angles(shape[0] + 1, shape[5], device), draw_angles(shape[0], shape[5], device, 3.0)
    made = views(torch.full((*shape[:2], q[0, 0].numel() + 2 * k[0, 0].numel()), 9.0).to(q), shape)
    before = [t.clone() for t in (q, k, v)]
    parts = [Rotated(q, made[0], angles[0]), Rotated(k, made[1], angles[1]), Rotated(v, made[2], None)]
    backend.rotate(parts, interleaved=interleaved, transposed=transposed)
    assert all(torch.equal(now, then) for now, then in zip((q, k, v), before, strict=True))
    assert torch.equal(made[2], v)
    for part, (x, out, a) in zip("qk", parts, strict=False):
        truth = exact(x, a, interleaved, transposed).to(device)
        library = reference.turned(x, a[: shape[0], None, None, None], interleaved, transposed)
        assert_as_good(part, out, library, truth)
        assert (out[..., shape[5] :] == x[..., shape[5] :]).all()
        assert not torch.allclose(out, x)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("transposed", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("name", rotary.names())
def test_tables_of_cosines_and_sines_may_have_a_scale(name, interleaved, transposed, device):
    backend, shape = supported(name, device), (21, 2, 1, 3, 20, 12)
    _, (q, k, v) = mixed_parts(shape, torch.float32, device)
    angles = draw_angles(21, 12, device)
    tables = 1.5 * torch.cat((angles.cos(), angles.sin()), 1)
    made = [torch.empty_like(t) for t in (q, k, v)]
    parts = [Rotated(q, made[0], tables), Rotated(k, made[1], tables), Rotated(v, made[2], None)]
    backend.rotate(parts, interleaved=interleaved, transposed=transposed, tables=True)
    assert torch.equal(made[2], v)
    for x, out in ((q, made[0]), (k, made[1])):
        truth = exact(x, angles, interleaved, transposed)
        truth[..., :12] *= 1.5
        torch.testing.assert_close(out.double().cpu(), truth, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match=r"\(T or more, 2 d\)"):
        backend.rotate([Rotated(q, made[0], tables[:, :22])], interleaved=interleaved, tables=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("name", rotary.names())
def test_in_place_it_leaves_the_rest_alone(name: str, interleaved: bool, device: str) -> None:
    """q by all of its features, k by fewer, in the projection's own memory; and back again."""
    backend, shape = supported(name, device), (19, 2, 2, 3, 24, 24)
    mixed, (q, k, v) = mixed_parts(shape, torch.float32, device, batch_first=True)
    before, angles = mixed.clone(), [draw_angles(19, d, device) for d in (24, 10)]
    apart = [torch.empty_like(t) for t in (q, k)]
    backend.rotate([Rotated(t, to, a) for t, to, a in zip((q, k), apart, angles, strict=True)], interleaved=interleaved)
    parts = [Rotated(t, t, a) for t, a in zip((q, k), angles, strict=True)]
    backend.rotate([*parts, Rotated(v, v, None)], interleaved=interleaved)
    assert torch.equal(q, apart[0])
    assert torch.equal(k, apart[1])
    assert torch.equal(v, views(before, shape, batch_first=True)[2])
    # What undoes a rotation is its transpose: pairs must have one angle.
    backend.rotate(parts, interleaved=interleaved, transposed=True)
    assert not torch.allclose(mixed, before, atol=1e-2)
    one = [a[:, ::2].repeat_interleave(2, 1) if interleaved else a[:, : a.shape[1] // 2].repeat(1, 2) for a in angles]
    mixed.copy_(before)
    parts = [Rotated(t, t, a) for t, a in zip((q, k), one, strict=True)]
    backend.rotate(parts, interleaved=interleaved)
    assert not torch.allclose(mixed, before, atol=1e-2)
    backend.rotate(parts, interleaved=interleaved, transposed=True)
    torch.testing.assert_close(mixed, before, atol=1e-5, rtol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", rotary.names())
def test_strides_of_any_kind(name: str, device: str) -> None:
    """Gradients as attention leaves them, (B, H, T, D); expanded ones; angles of every other column."""
    backend = supported(name, device)
    q = torch.randn(2, 6, 21, 16, device=device).permute(2, 0, 1, 3).unflatten(2, (2, 3))
    k = torch.randn(21, 1, 1, 1, 16, device=device).expand(21, 2, 2, 1, 16)
    angles = draw_angles(21, 24, device)[:, ::2]
    made = views(torch.zeros(21, 2, 2 * 5 * 16, device=device), (21, 2, 2, 3, 16, 12))
    backend.rotate([Rotated(k, made[1], angles), Rotated(q, made[0], angles)], interleaved=False, transposed=True)
    for x, out in ((q, made[0]), (k, made[1])):
        torch.testing.assert_close(out.double().cpu(), exact(x, angles, False, True), atol=1e-5, rtol=1e-5)
    assert not made[2].any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", rotary.names())
def test_one_position_and_none(name: str, device: str) -> None:
    backend = supported(name, device)
    x, angles = torch.randn(1, 2, 1, 3, 8, device=device), draw_angles(1, 8, device)
    out = torch.empty_like(x)
    backend.rotate([Rotated(x, out, angles)], interleaved=True)
    torch.testing.assert_close(out.double().cpu(), exact(x, angles, True, False), atol=1e-5, rtol=1e-5)
    for shape in ((0, 2, 1, 3, 8), (3, 0, 1, 3, 8), (3, 2, 1, 0, 8), (3, 2, 1, 3, 0)):
        empty, none = torch.empty(shape, device=device), draw_angles(3, min(8, shape[4]), device)
        backend.rotate([Rotated(empty, torch.empty_like(empty), none)], interleaved=False)
    copy = torch.empty_like(x)
    backend.rotate([Rotated(x, copy, None)], interleaved=False)  # nothing turns
    assert torch.equal(copy, x)
    headless, copy, again = torch.empty(1, 2, 1, 0, 8, device=device), torch.empty_like(x), torch.empty_like(x)
    backend.rotate(
        [Rotated(headless, headless, angles), Rotated(x, again, angles), Rotated(x, copy, None)], interleaved=True
    )
    assert torch.equal(again, out)
    assert torch.equal(copy, x)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("axis", [2, 3], ids=["groups", "heads"])
def test_heads_whose_places_32_bits_do_not_count(axis: int, device: str) -> None:
    """As in a gradient (B, H, T, D) of 129 heads and 131,072 positions. Pages that nobody touches take no memory."""
    room, size, stride = torch.empty(2**31 + 8, dtype=torch.float16, device=device), [1, 1, 1, 1, 8], [8, 8, 8, 8, 1]
    size[axis], stride[axis] = 3, 2**30
    far = room.as_strided(size, stride)
    near, angles = torch.randn(size, device=device).half(), draw_angles(1, 8, device)
    backend, wanted, back = supported("triton", device), torch.empty_like(near), torch.empty_like(near)
    backend.rotate([Rotated(near, wanted, angles)], interleaved=False)
    backend.rotate([Rotated(near, far, angles)], interleaved=False)
    assert torch.equal(far, wanted)
    backend.rotate([Rotated(far, back, angles)], interleaved=False, transposed=True)
    backend.rotate([Rotated(wanted, near, angles)], interleaved=False, transposed=True)
    assert torch.equal(back, near)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", rotary.names())
def test_angles_of_a_million_positions(name: str, device: str) -> None:
    backend = supported(name, device)
    x, angles = torch.randn(65, 1, 1, 1, 8, device=device), draw_angles(65, 8, device, 1e6)
    out = torch.empty_like(x)
    backend.rotate([Rotated(x, out, angles)], interleaved=False)
    torch.testing.assert_close(out.double().cpu(), exact(x, angles, False, False), atol=1e-5, rtol=0)


def test_the_remainder_by_half_pi_is_that_of_float32() -> None:
    """A GPU's, where each fused multiplication and addition is rounded once: the interpreter's is float64's."""
    parts = [part.value for part in (kernels.HIGH, kernels.MIDDLE, kernels.LOW)]
    assert parts == [torch.tensor(part, dtype=torch.float32).item() for part in parts]
    half_pi = Fraction(314159265358979323846264338327950288, 2 * 10**35)
    assert abs(sum(map(Fraction, parts)) - half_pi) < Fraction(1, 4 * 10**20)
    for quarters in (1, 4, 4000, 636620):
        angle = Fraction(torch.tensor(float(quarters * half_pi)).item())
        exact, remainder = angle - quarters * half_pi, angle
        for part in parts:
            remainder = Fraction(torch.tensor(float(remainder - quarters * Fraction(part)), dtype=torch.float32).item())
        assert abs(remainder - exact) < Fraction(1, 2**22)
    assert round(float(kernels.QUARTERS.value * half_pi), 12) == 1


@pytest.mark.parametrize("device", DEVICES)
def test_cosines_and_sines_are_float32s(device: str) -> None:
    """All around the circle, and in every quarter."""
    angles = torch.linspace(-20, 20, 2001, device=device)[:, None].repeat(1, 2)
    x = torch.ones(2001, 1, 1, 1, 2, device=device)
    x[..., 1] = 0
    out = torch.empty_like(x)
    supported("triton", device).rotate([Rotated(x, out, angles)], interleaved=False)
    turned = angles[:, 0].double()
    exact = torch.stack([turned.cos(), turned.sin()], 1)
    assert (out.flatten(1).double() - exact).abs().max() < 2**-23


@pytest.mark.parametrize("name", rotary.names())
def test_what_is_not_finite_stays_with_its_pair(name: str) -> None:
    backend, x = supported(name, "cpu"), torch.ones(3, 1, 1, 1, 8)
    x[1, ..., 2] = float("inf")
    out, copy, angles = torch.empty_like(x), torch.empty_like(x), draw_angles(3, 8, "cpu")
    backend.rotate([Rotated(x, out, angles), Rotated(x, copy, None)], interleaved=False)
    assert (~out.isfinite()).nonzero()[:, [0, 4]].tolist() == [[1, 2], [1, 6]]
    assert torch.equal(copy, x)


def part(*shape: int, out: Tensor | None = None, angles: Tensor | None = None) -> Rotated:
    x = torch.zeros(shape)
    return Rotated(x, torch.zeros(shape) if out is None else out, torch.zeros(4, 8) if angles is None else angles)


@pytest.mark.parametrize("name", rotary.names())
@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ([], "0 parts"),
        ([part(4, 1, 1, 2, 8)] * 4, "4 parts"),
        ([part(4, 1, 2, 8)], "must be"),
        ([part(4, 1, 1, 2, 8), part(5, 1, 1, 2, 8)], "must be"),
        ([part(4, 1, 1, 2, 8), part(4, 1, 1, 2, 16)], "must be"),
        ([part(4, 1, 1, 2, 8, out=torch.zeros(4, 1, 1, 1, 8))], "must be"),
        ([part(4, 1, 1, 2, 8, out=torch.zeros(4, 1, 1, 2, 8).half())], "one dtype"),
        ([part(4, 1, 1, 2, 8, out=torch.zeros(4, 1, 1, 8, 2).transpose(3, 4))], "the last must be 1"),
        ([part(5, 1, 1, 2, 8)], r"angles \(4, 8\)"),
        ([part(4, 1, 1, 2, 4)], r"angles \(4, 8\)"),
        ([part(4, 1, 1, 2, 8, angles=torch.zeros(4, 7))], r"angles \(4, 7\)"),
        ([part(4, 1, 1, 2, 8, angles=torch.zeros(4, 8).double())], "float32"),
    ],
    ids=range(12),
)
def test_what_is_wrong_is_named(name: str, parts: list[Rotated], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        supported(name, "cpu").rotate(parts, interleaved=False)


def test_the_kernel_has_no_float64() -> None:
    x = torch.zeros(4, 1, 1, 2, 8).double()
    with pytest.raises(ValueError, match="float64"):
        supported("triton", "cpu").rotate([Rotated(x, x, torch.zeros(4, 8))], interleaved=False)


@pytest.mark.gpu
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize(("t", "b", "h", "d"), [(2048, 4, 32, 128), (1024, 12, 12, 64)])
def test_it_is_bound_by_memory(t: int, b: int, h: int, d: int, interleaved: bool) -> None:
    backend = supported("triton", "cuda", dtype="bf16")
    mixed, made = torch.randn(2, t, b, 3, h, d, device="cuda").bfloat16().unbind()
    angles = draw_angles(t, d, "cuda")
    (q, k, v), to = mixed.unbind(2), [x[:, :, None] for x in made.unbind(2)]
    forward = [Rotated(x[:, :, None], x[:, :, None], angles) for x in (q, k)]
    back = [Rotated(x[:, :, None], y, a) for x, y, a in zip((q, k, v), to, (angles, angles, None), strict=True)]
    third = 2 * mixed.numel() * mixed.element_size() // 3
    for label, parts, nbytes in (("in place", forward, 2 * third), ("backward", back, 3 * third)):

        def call(parts: list[Rotated] = parts, transposed: bool = label == "backward") -> None:
            backend.rotate(parts, interleaved=interleaved, transposed=transposed)

        assert of_copy(call, nbytes, mixed, f"rotary {label}") > 0.6
