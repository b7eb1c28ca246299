"""Rotary embeddings against complex multiplication in float64."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_packed_sequences import starts_of
from torch import Tensor, nn

from te_bench.models.modules.attention import MultiheadAttention
from te_bench.models.modules.rotary import RotaryPositionEmbedding, apply_rotary_pos_emb

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def turned(t: Tensor, d: int, interleaved: bool, positions: Tensor, base: float = 10000.0) -> Tensor:
    """t (s, b, h, D) with features 0..d-1 turned, by e^{i position base^(-2 k / d)} on complex numbers."""
    x = t.double().cpu()
    rate = torch.tensor([base ** (-2 * k / d) for k in range(d // 2)], dtype=torch.float64)
    angle = positions.double()[:, None, None, None] * rate
    first, second = (x[..., 0:d:2], x[..., 1:d:2]) if interleaved else (x[..., : d // 2], x[..., d // 2 : d])
    z = torch.complex(first, second) * torch.polar(torch.ones_like(angle), angle)
    out = x.clone()
    if interleaved:
        out[..., 0:d:2], out[..., 1:d:2] = z.real, z.imag
    else:
        out[..., : d // 2], out[..., d // 2 : d] = z.real, z.imag
    return out


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("percent", [1.0, 0.5])
@pytest.mark.parametrize("interleaved", [False, True])
def test_a_pair_of_features_turns(interleaved: bool, percent: float, dtype: torch.dtype, device: str) -> None:
    t = torch.randn(33, 2, 3, 16).to(device, dtype)
    embedding = RotaryPositionEmbedding(16, percent, interleaved=interleaved).to(device)
    freqs = embedding(40)
    assert freqs.shape == (40, 1, 1, int(16 * percent))
    assert freqs.dtype == torch.float32
    out = apply_rotary_pos_emb(t, freqs, interleaved=interleaved)
    assert out.dtype == dtype
    exact = turned(t, int(16 * percent), interleaved, torch.arange(33))
    # The angles are float32's: 32 radians to 2e-6.
    error = (out.double().cpu() - exact).abs().max().item()
    assert error <= torch.finfo(dtype).eps * 4 + 2e-5
    assert (out[1:] != t[1:]).any()


def test_both_layouts_agree() -> None:
    t, freqs = torch.randn(9, 2, 3, 8), RotaryPositionEmbedding(8).to("cpu")(9)
    sbhd = apply_rotary_pos_emb(t, freqs, "sbhd")
    bshd = apply_rotary_pos_emb(t.transpose(0, 1), freqs, "bshd")
    assert torch.equal(sbhd, bshd.transpose(0, 1))


def test_an_offset_goes_on_where_the_last_stopped() -> None:
    embedding = RotaryPositionEmbedding(8).to("cpu")
    assert torch.equal(embedding(5, offset=3), embedding(8)[3:])


def test_interpolation() -> None:
    plain = RotaryPositionEmbedding(8).to("cpu")
    squeezed = RotaryPositionEmbedding(8, 1.0, 4, 16).to("cpu")
    torch.testing.assert_close(squeezed(64)[::4], plain(16))  # up to 4 x 16 positions: a fourth of the angle
    torch.testing.assert_close(squeezed(128)[::8], plain(16))  # beyond: as much as brings them back to 16


def test_another_base() -> None:
    freqs = RotaryPositionEmbedding(4, rotary_base=100.0).to("cpu")(3)
    torch.testing.assert_close(freqs[2, 0, 0], torch.tensor([2.0, 0.2, 2.0, 0.2]))


def test_bf16_autocast_leaves_the_angles_alone() -> None:
    embedding = RotaryPositionEmbedding(8).to("cpu")
    with torch.autocast("cpu", torch.bfloat16):
        freqs = embedding(4097)
    assert freqs[4095, 0, 0, 0].item() == 4095.0


@pytest.mark.parametrize("change", [nn.Module.bfloat16, nn.Module.half, nn.Module.double], ids=lambda f: f.__name__)
def test_a_model_in_another_dtype_has_the_same_angles(change: Callable[[nn.Module], nn.Module]) -> None:
    embedding = RotaryPositionEmbedding(64).to("cpu")
    expected = embedding(2048)
    change(nn.Sequential(embedding))
    assert torch.equal(embedding(2048), expected)


def test_a_model_that_leaves_the_meta_device_has_angles() -> None:
    with torch.device("meta"):
        embedding = RotaryPositionEmbedding(4, rotary_base=100.0)
    freqs = embedding.to_empty(device="cpu")(3)
    torch.testing.assert_close(freqs[2, 0, 0], torch.tensor([2.0, 0.2, 2.0, 0.2]))


def test_the_gradient_turns_back() -> None:
    t = torch.randn(7, 1, 2, 8, dtype=torch.float64, requires_grad=True)
    freqs = RotaryPositionEmbedding(6).to("cpu")(7).double()
    g = torch.randn_like(t)
    (grad,) = torch.autograd.grad(apply_rotary_pos_emb(t, freqs), t, g)
    torch.testing.assert_close(apply_rotary_pos_emb(grad, freqs), g)
    assert torch.autograd.gradcheck(lambda x: apply_rotary_pos_emb(x, freqs, interleaved=True), (t,))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"tensor_format": "bhsd"}, "tensor_format='bhsd' is not possible: sbhd, bshd or thd"),
        ({"cp_size": 2}, "cp_size"),
        ({"start_positions": torch.zeros(2)}, "start_positions"),
        ({"cu_seqlens": torch.zeros(2)}, "cu_seqlens is for tensor_format='thd', not 'sbhd'"),
        ({"freqs": torch.zeros(3, 1, 1, 8)}, "too short"),
        ({"freqs": torch.zeros(9, 1, 1, 10)}, "too wide"),
        ({"freqs": None}, "freqs must be a floating-point tensor of angles .*, got NoneType"),
        ({"freqs": torch.zeros(9, 1, 1, 8, dtype=torch.int64)}, "got torch.int64"),
        ({"freqs": torch.zeros(9, 1, 3, 8)}, r"freqs \(9, 1, 3, 8\) are of another batch or other heads than the sbhd"),
        ({"freqs": torch.zeros(9, 3, 1, 8)}, "another batch"),
    ],
)
def test_what_is_wrong_is_named(options: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        apply_rotary_pos_emb(torch.zeros(9, 1, 2, 8), **{"freqs": torch.zeros(9, 1, 1, 8), **options})  # type: ignore[arg-type]


def test_an_odd_number_of_features_has_no_pairs() -> None:
    with pytest.raises(ValueError, match="even and positive, got 7"):
        RotaryPositionEmbedding(7)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda f: [f, f], "list"),
        (lambda f: (f, None), "a tuple of 2"),
        (lambda f: (f,), "a tuple of 1"),
        (lambda f: (f, f, f), "a tuple of 3"),
        (lambda f: 5, "int"),
    ],
    ids=["list", "none", "one", "three", "number"],
)
def test_what_are_no_angles_is_told(wrong: Any, said: str) -> None:
    layer, freqs = MultiheadAttention(64, 4), RotaryPositionEmbedding(16)(8)
    with pytest.raises(ValueError, match=f"rotary_pos_emb: {said}; give RotaryPositionEmbedding's angles"):
        layer(torch.randn(8, 2, 64), rotary_pos_emb=wrong(freqs))


# Packed sequences


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("lengths", [(5, 0, 7, 1, 0), (9,), (0, 0, 9)], ids=str)
def test_a_packed_sequence_turns_as_it_does_alone(lengths, interleaved, dtype, device):
    """Bit for bit, forward and backward; of 16 features 12 turn."""
    starts = starts_of(lengths).to(device, torch.int32 if interleaved else torch.int64)
    t, dy = torch.randn(2, sum(lengths), 3, 16).to(device, dtype)
    freqs = RotaryPositionEmbedding(12, interleaved=interleaved).to(device)(9)
    t.requires_grad_()
    out = apply_rotary_pos_emb(t, freqs, "thd", cu_seqlens=starts, interleaved=interleaved)
    (grad,) = torch.autograd.grad(out, t, dy)
    assert out.dtype == dtype
    for begin, end in itertools.pairwise(starts.tolist()):
        one = t[begin:end, None].detach().requires_grad_()
        alone = apply_rotary_pos_emb(one, freqs, interleaved=interleaved)
        assert torch.equal(out[begin:end, None], alone)
        assert torch.equal(grad[begin:end, None], torch.autograd.grad(alone, one, dy[begin:end, None])[0])
    places = torch.cat([torch.arange(length) for length in lengths])
    exact = turned(t[:, None], 12, interleaved, places).squeeze(1)
    assert (out.double().cpu() - exact).abs().max() <= torch.finfo(dtype).eps * 4 + 2e-5
    assert (out[places > 0] != t[places > 0]).any(2).all()


@pytest.mark.parametrize("device", DEVICES)
def test_rows_after_the_last_sequence_read_no_angle_that_is_not_there(device: str) -> None:
    """More of them than there are angles: numbers, and their gradient of 0 stays 0."""
    t = torch.randn(40, 2, 8, device=device, requires_grad=True)
    freqs = RotaryPositionEmbedding(8).to(device)(5)
    out = apply_rotary_pos_emb(t, freqs, "thd", cu_seqlens=starts_of((3, 5)).to(device))
    assert out.isfinite().all()
    (grad,) = torch.autograd.grad(out[:8].sum(), t)
    assert grad[:8].all()
    assert not grad[8:].any()


def test_learned_angles_gather_the_gradients_of_all_sequences() -> None:
    t, weights = torch.randn(13, 2, 8, dtype=torch.float64), torch.arange(1, 9)
    freqs, starts = torch.randn(9, 1, 1, 6, dtype=torch.float64, requires_grad=True), starts_of((5, 0, 7, 1))
    together = apply_rotary_pos_emb(t, freqs, "thd", cu_seqlens=starts)
    parts = [apply_rotary_pos_emb(t[i:j, None], freqs) for i, j in itertools.pairwise(starts.tolist())]
    sums = [(out.square() * weights).sum() for out in (together, torch.cat(parts))]
    (mine,), (theirs,) = (torch.autograd.grad(value, freqs) for value in sums)
    torch.testing.assert_close(mine, theirs)
    assert mine[:7].all()
    assert not mine[7:].any()


def test_packed_sequences_compile_and_beyond_the_angles_they_are_nan() -> None:
    """Compiled code reads no lengths, and so cannot refuse."""
    t, starts, freqs = torch.randn(15, 2, 8), starts_of((5, 0, 7, 1)), RotaryPositionEmbedding(6).to("cpu")(7)
    out = apply_rotary_pos_emb(t, freqs, "thd", cu_seqlens=starts)
    compiled = torch.compile(apply_rotary_pos_emb, fullgraph=True, backend="eager")
    assert torch.equal(compiled(t, freqs, "thd", cu_seqlens=starts), out)
    short = compiled(t, freqs[:5], "thd", cu_seqlens=starts)
    assert short[10:12, :, :6].isnan().all()
    assert torch.equal(short[10:12, :, 6:], t[10:12, :, 6:])
    rest = [*range(10), 12]
    assert torch.equal(short[rest], out[rest])
    assert short[13:].isfinite().all()


def test_where_the_host_would_wait_it_reads_no_lengths() -> None:
    """Of the meta device nothing can be read."""
    t = torch.randn(13, 2, 8, device="meta", requires_grad=True)
    freqs = torch.randn(7, 1, 1, 8, device="meta")
    out = apply_rotary_pos_emb(t, freqs, "thd", cu_seqlens=starts_of((5, 0, 7, 1)).to("meta"))
    (grad,) = torch.autograd.grad(out, t, torch.empty_like(out))
    assert out.shape == grad.shape == t.shape


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"cu_seqlens": None}, "cu_seqlens must be a tensor of torch.int32 or torch.int64, got NoneType"),
        ({"cu_seqlens": torch.tensor([0])}, r"cu_seqlens must be \(sequences \+ 1,\), got \(1,\)"),
        ({"cu_seqlens": torch.tensor([0, 10])}, "sequence 0 would have 10 of 9 positions"),
        ({"cu_seqlens": torch.zeros(2, dtype=torch.int32, device="meta")}, "cu_seqlens is on meta"),
        ({"t": torch.zeros(9, 1, 2, 8)}, r"t must be thd, \(rows, heads, features\), got \(9, 1, 2, 8\)"),
        ({"freqs": torch.zeros(5, 1, 1, 8)}, "S at least the longest sequence's rows, 6"),
        ({"freqs": torch.zeros(0, 1, 1, 8), "cu_seqlens": torch.tensor([0, 0])}, "S at least the longest"),
        ({"freqs": torch.zeros(9, 2, 1, 8)}, r"freqs \(9, 2, 1, 8\) must be \(S, 1, 1, d2\)"),
        ({"freqs": torch.zeros(9, 1, 1, 8, device="meta")}, "freqs are on meta, cu_seqlens on cpu: move them"),
        ({"freqs": torch.zeros(9, 8)}, r"freqs \(9, 8\) must be"),
        ({"freqs": torch.zeros(9, 1, 1, 7)}, "d2 even"),
        ({"freqs": torch.zeros(9, 1, 1, 10)}, r"too wide, or of other heads, for a thd \(9, 2, 8\)"),
        ({"freqs": torch.zeros(9, 1, 3, 8)}, "of other heads"),
        ({"freqs": [1.0]}, "freqs must be a floating-point tensor of angles .*, got list"),
        ({"freqs": torch.zeros(9, 1, 1, 8, dtype=torch.int64)}, "got torch.int64"),
        ({"start_positions": torch.zeros(2)}, "no start_positions"),
        ({"cp_size": 2}, "no cp_size"),
    ],
)
def test_what_packed_sequences_cannot_be_is_named(options: dict[str, object], reason: str) -> None:
    given = {"t": torch.zeros(9, 2, 8), "freqs": torch.zeros(9, 1, 1, 8), "cu_seqlens": starts_of((3, 6))}
    with pytest.raises(ValueError, match=reason):
        apply_rotary_pos_emb(**{**given, **options}, tensor_format="thd")  # type: ignore[arg-type]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dims", [(0, 1), (1, 2), (2, 3)])
def test_a_transposed_input_gives_a_contiguous_output(dims: tuple[int, int], device: str) -> None:
    freqs = RotaryPositionEmbedding(16).to(device)(16)
    t = torch.randn(16, 16, 16, 16, device=device).transpose(*dims).requires_grad_()
    assert not t.is_contiguous()
    out = apply_rotary_pos_emb(t, freqs)
    assert out.is_contiguous()
    assert torch.equal(out, apply_rotary_pos_emb(t.contiguous(), freqs))
