"""Packed sequences: bit for bit what each gives by itself, by the kernels; and padded for backends that have none."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from test_contract import a_problem, gradients, largest
from test_triton import DEVICES, drawn, with_infinite_keys
from torch import Tensor

from te_bench.kernels import attention
from te_bench.kernels.attention import Backend
from te_bench.kernels.attention.backends import triton as ours
from te_bench.kernels.attention.packed import attend_packed

ROWS, KEYS = (5, 70, 0, 33), (40, 3, 9, 60)
BEYOND = 3  # rows and keys after the last sequence
CASES: dict[str, tuple[tuple[int, ...], dict[str, object], int]] = {
    "causal": (ROWS, {"causal": True}, 4),
    "full, shared heads": (ROWS, {"causal": False}, 2),
    "window, one head for all": (ROWS, {"causal": True, "window": (9, 0)}, 1),
    "other lengths": (KEYS, {"causal": False}, 4),
    "other lengths, windows past some rows": (KEYS, {"causal": True, "window": (7, -1)}, 4),
    "no keys of one": ((40, 3, 9, 0), {"causal": False}, 2),
}


def starts(lengths: tuple[int, ...], device: str) -> Tensor:
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)


def tensors_of(keys: tuple[int, ...], kv_heads: int, device: str, width: int = 16) -> list[Tensor]:
    rows, total = sum(ROWS) + BEYOND, sum(keys) + BEYOND
    return drawn(device, (rows, 4, width), (total, kv_heads, width), (total, kv_heads, 8), (rows, 4, 8))


def each(backend: Backend, keys: tuple[int, ...], device: str, **options: object) -> Callable[..., Tensor]:
    """Every sequence by itself, rows of none 0."""

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        made, row, key = [], 0, 0
        for rows, others in zip(ROWS, keys, strict=True):
            own = q[row : row + rows], k[key : key + others], v[key : key + others]
            if rows and others:
                out = attention.attend(backend, *(x.transpose(0, 1)[None] for x in own), scale=0.25, **options)  # type: ignore[arg-type]
                made.append(out[0].transpose(0, 1))
            else:
                made.append(own[0].new_zeros(rows, q.shape[1], v.shape[2]))
            row, key = row + rows, key + others
        return torch.cat([*made, q.new_zeros(BEYOND, q.shape[1], v.shape[2])])

    return forward


def together(backend: Backend, keys: tuple[int, ...], device: str, **options: object) -> Callable[..., Tensor]:
    begin = starts(ROWS, device)
    begin_k = begin if keys == ROWS else starts(keys, device)

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend_packed(
            backend, q, k, v, begin, begin_k, (max(ROWS), max(keys)), scale=0.25, **options  # type: ignore[arg-type]
        )  # fmt: skip

    return forward


def packed_gradients(forward: Callable[..., Tensor], tensors: list[Tensor]) -> list[Tensor]:
    q, k, v = (t.detach().requires_grad_() for t in tensors[:3])
    out = forward(q, k, v)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), tensors[3].to(out.dtype))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES)
def test_the_kernels_do_with_a_sequence_what_they_do_with_it_alone(case: str, device: str) -> None:
    keys, options, kv_heads = CASES[case]
    tensors, backend = tensors_of(keys, kv_heads, device), attention.load("triton")
    ours_ = packed_gradients(together(backend, keys, device, **options), tensors)
    alone = packed_gradients(each(backend, keys, device, **options), tensors)
    for value, exact in zip(ours_, alone, strict=True):
        if device == "cpu":
            assert torch.equal(value, exact)
        else:  # compiled apart: the same sums, which may be contracted otherwise
            assert largest(value - exact) <= 0.01 * max(1.0, largest(exact))


def assert_as_manual(name: str, case: str, device: str, tensors: list[Tensor], since: int = 0) -> None:
    """The output and the gradients, or those from the `since`-th on."""
    keys, options, _ = CASES[case]
    made = packed_gradients(together(attention.load(name), keys, device, **options), tensors)
    exact = [t.double() for t in tensors]
    truth = packed_gradients(each(attention.load("manual"), keys, device, **options), exact)
    for value, true in zip(made[since:], truth[since:], strict=True):
        assert true.isfinite().all()
        assert largest(value - true) <= (1e-5 if device == "cpu" else 0.05) * max(1.0, largest(true))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("case", ["full, shared heads", "window, one head for all"])
def test_tiles_of_their_own_for_shared_heads(case: str, width: int, device: str) -> None:
    keys, _, kv_heads = CASES[case]
    assert_as_manual("triton", case, device, tensors_of(keys, kv_heads, device, width))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.parametrize("case", [case for case in CASES if "other" not in case])
def test_a_key_of_no_weight_has_gradients_of_0_whatever_it_holds(case: str, device: str) -> None:
    """Every sequence's last tile of rows ends in the next one's."""
    keys, _, kv_heads = CASES[case]
    assert_as_manual("triton", case, device, with_infinite_keys(tensors_of(keys, kv_heads, device)), since=2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["manual", "auto"])
def test_a_backend_that_takes_none_gets_them_padded(name: str, case: str, device: str) -> None:
    keys, _, kv_heads = CASES[case]
    problem = a_problem((4, 4, max(ROWS), 16), "fp32" if device == "cpu" else "bf16", device, packed=True)
    backend = attention.load(name)
    assert backend.unsupported(attention.posed(backend, problem)) is None
    assert_as_manual(name, case, device, tensors_of(keys, kv_heads, device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["manual", "triton"])
def test_rows_before_the_first_sequence_are_of_none(name: str, device: str) -> None:
    tensors = drawn(device, *[(7, 2, 16)] * 4)

    def of(begin: int) -> list[Tensor]:
        starts_ = torch.tensor([begin, begin + 3, begin + 4], device=device)
        options = {"causal": True, "scale": 0.25}
        forward = lambda *qkv: attend_packed(attention.load(name), *qkv, starts_, starts_, (3, 3), **options)  # noqa: E731
        return packed_gradients(forward, [t[3 - begin :] for t in tensors])

    for among, alone in zip(of(3), of(0), strict=True):
        assert (among[:3] == 0).all()
        assert torch.allclose(among[3:], alone, atol=1e-5 if device == "cpu" else 0.05)


def test_what_takes_none_is_posed_a_mask() -> None:
    problem = a_problem((4, 4, 70, 16), causal=True, packed=True)
    assert attention.posed(attention.load("triton"), problem) == problem
    posed = attention.posed(attention.load("mem_efficient"), problem)
    assert (posed.packed, posed.mask, posed.causal) == (False, True, False)
    assert attention.load("flash").unsupported(attention.posed(attention.load("flash"), problem)) is not None


@pytest.mark.parametrize("device", DEVICES)
def test_dropout_is_of_the_sequence_and_its_rows(device: str) -> None:
    """The same of a sequence wherever it lies among the rows: its number and its rows count, not where it begins."""
    q, k, v, _ = drawn(device, *[(90, 2, 16)] * 4)
    made = []
    for shift in (0, 7):
        begin = torch.tensor([shift, shift + 40, shift + 70], device=device, dtype=torch.int32)
        moved = [x.roll(shift, 0) for x in (q, k, v)]
        torch.manual_seed(5)
        out, _ = ours.packed_attention(*moved, begin, begin, (40, 40), causal=True, scale=0.25, dropout=0.4)
        made.append(out.roll(-shift, 0)[:70])
    assert torch.equal(*made)
    assert not torch.equal(made[0], made[0].roll(40, 0))


@pytest.mark.parametrize("device", DEVICES)
def test_the_logarithms_of_the_sums(device: str) -> None:
    q, k, v, _ = tensors_of(ROWS, 4, device)
    begin = starts(ROWS, device)
    _, lse = ours.packed_attention(q, k, v, begin, begin, (70, 70), scale=0.3)
    assert (lse[:, sum(ROWS) :] == -math.inf).all()
    for i, rows in enumerate(ROWS):
        own = slice(int(begin[i]), int(begin[i]) + rows)
        exact = (0.3 * torch.einsum("thd,shd->hts", q[own].double(), k[own].double())).logsumexp(-1)
        torch.testing.assert_close(lse[:, own].double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"q": torch.zeros(1, 3, 2, 4)}, r"packed sequences are \(rows, heads, features\)"),
        ({"starts_q": torch.zeros(2)}, "starts_q is"),
        ({"starts_k": torch.zeros(1, 2, dtype=torch.int32)}, "starts_k is"),
        ({"starts_k": torch.tensor([0, 1, 3])}, "starts_q has 2 entries, starts_k 3"),
        ({"k": torch.zeros(3, 3, 4), "v": torch.zeros(3, 3, 4)}, "must divide"),
    ],
)
def test_what_is_no_packed_attention_is_refused(changes: dict[str, Tensor], words: str) -> None:
    given = {name: torch.zeros(3, 2, 4) for name in "qkv"}
    given |= {"starts_q": torch.tensor([0, 3]), "starts_k": torch.tensor([0, 3]), **changes}
    with pytest.raises(ValueError, match=words):
        ours.packed_attention(*given.values(), (3, 3), scale=1.0)


def by_manual(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention.load("manual").forward(q, k, v, causal=True, scale=0.125)


@pytest.mark.gpu
def test_many_lengths_at_full_width_on_a_gpu() -> None:
    """bf16, D 64 and 128, tiles of the launcher's own: against float64, sequence by sequence."""
    lengths = (1000, 1, 513, 64, 2048, 0, 777)
    for width, kv_heads in itertools.product((64, 128), (8, 2)):
        q, k, v, dout = (
            torch.randn(sum(lengths), heads, width, device="cuda", dtype=torch.bfloat16)
            for heads in (8, kv_heads, kv_heads, 8)
        )
        begin = starts(lengths, "cuda")
        got = packed_gradients(
            lambda *x, begin=begin: ours.packed(*x, begin, begin, (2048, 2048), causal=True, scale=0.125),
            [q, k, v, dout],
        )
        for i, rows in enumerate(lengths):
            own = slice(int(begin[i]), int(begin[i]) + rows)
            if not rows:
                continue
            one = [x[own].transpose(0, 1)[None] for x in (q, k, v, dout)]
            exact = gradients(by_manual, one, torch.float64)
            for value, true in zip(got, exact, strict=True):
                assert largest(value[own].transpose(0, 1)[None] - true) <= 0.03 * max(1.0, largest(true))
