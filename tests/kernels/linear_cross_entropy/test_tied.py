"""The tied embedding: the gradients of autograd's own sum, in one table, added in the same order in every run."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lce_checks import PLACES
from torch import Tensor

from te_bench.kernels import linear_cross_entropy
from te_bench.kernels.linear_cross_entropy import kernels, tied

VOCAB, PADDED, D = 50, 64, 48


def prepare(place: str, monkeypatch: pytest.MonkeyPatch) -> str:
    if place == "interpreted" and not tied.INTERPRETED:
        pytest.skip("needs TRITON_INTERPRET=1")
    monkeypatch.setattr(tied, "INTERPRETED", place == "interpreted")
    monkeypatch.setattr(kernels, "INTERPRETED", False)  # the losses are tested elsewhere
    for constants in (tied.CONSTANTS, tied.LOOKUP):
        monkeypatch.setitem(constants, "COLUMNS", 32)  # two programs a token, the second with less to do
    return "cuda" if place == "cuda" else "cpu"


def draw(n: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """A table, rows, and tokens of which one is there more often than a turn takes."""
    generator = torch.Generator().manual_seed(n)
    tokens = torch.randint(0, VOCAB, (n,), generator=generator)
    tokens[torch.randperm(n, generator=generator)[: n // 2]] = 7
    table, rows = (torch.randn(height, D, generator=generator) for height in (PADDED, n))
    return table.to(device), rows.to(device), tokens.to(device)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("n", [0, 1, 16, 70])
def test_rows_are_added_where_their_tokens_are(n: int, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    table, rows, tokens = draw(n, prepare(place, monkeypatch))
    for dtype, error in ((torch.float32, 1e-6), (torch.bfloat16, 1e-6)):
        given = rows.to(dtype)
        exact = table.double().index_add(0, tokens, given.double())
        found = table.clone()
        tied.add_rows(found, given, tokens)
        torch.testing.assert_close(found.double(), exact, rtol=error, atol=20 * error)
        again = table.clone()
        tied.add_rows(again, given, tokens)
        assert torch.equal(found, again)
        whole = table.round()
        tied.add_rows(whole, given.round(), tokens)
        assert torch.equal(whole, table.round().index_add(0, tokens, given.round().float()))


@pytest.mark.gpu
def test_rows_of_a_text_at_size() -> None:
    """A twentieth of the tokens are one word."""
    tokens = torch.randint(0, 50257, (12288,), device="cuda")
    tokens[::20] = 262
    rows, table = torch.randn(12288, 768, device="cuda"), torch.randn(50304, 768, device="cuda")
    exact = table.double().index_add(0, tokens, rows.double())
    found = [table.clone() for _ in range(3)]
    for one in found:
        tied.add_rows(one, rows, tokens)
    torch.testing.assert_close(found[0].double(), exact, rtol=1e-5, atol=1e-4)
    assert all(torch.equal(found[0], one) for one in found[1:])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("shape", [(0, 7), (1, 1), (3, 7), (2, 16)])
def test_rows_of_two_tables_are_looked_up_and_added(shape, place, monkeypatch):
    table, positions, tokens = draw(40, prepare(place, monkeypatch))
    tokens, positions = tokens[: shape[0] * shape[1]].view(shape), positions[: shape[1] + 2]
    expected = table[tokens] + positions[: shape[1]]
    assert torch.equal(tied.embed(table, positions, tokens), expected)
    apart = table.new_zeros(PADDED, 2 * D)[:, :D]
    apart.copy_(table)
    turned, across = tokens.t().contiguous().t(), positions.t().contiguous().t()
    assert torch.equal(tied.embed(apart, across, turned), expected)
    assert torch.equal(
        tied.embed(table, positions.bfloat16(), tokens), table[tokens] + positions[: shape[1]].bfloat16()
    )


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.parametrize("place", PLACES)
def test_what_does_not_fit_the_table_is_refused(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    table, positions, tokens = draw(14, prepare(place, monkeypatch))
    tokens = tokens.view(2, 7)
    for wrong in (positions[:6], positions[:1], positions[:, :32]):
        with pytest.raises(ValueError, match="at least 7 rows of 48 columns"):
            tied.embed(table, wrong, tokens)
    with pytest.raises(RuntimeError, match=r"Long|Int"):
        tied.embed(table, positions, tokens.float())
    for apart in ((positions.to("meta"), tokens), (None, tokens.to("meta"))):
        with pytest.raises(ValueError, match=r"meta.*: move them to one device"):
            tied.embed(table, *apart)
    assert torch.equal(tied.embed(table, positions, tokens.int()), table[tokens] + positions[:7])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.parametrize("place", [place for place in PLACES if place != "plain"])
def test_an_unknown_token_is_nan_and_adds_to_no_row(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    table, rows, tokens = draw(14, prepare(place, monkeypatch))
    tokens[[0, 5, 6]] = torch.tensor([-1, PADDED, 2**31 - 1], device=tokens.device)
    known = (tokens >= 0) & (tokens < PADDED)
    found = tied.embed(table, rows, tokens.view(2, 7)).flatten(0, 1)
    assert torch.equal(found.isnan().all(1), ~known)
    assert torch.equal(found[known], (table[tokens[known]] + rows[:7].repeat(2, 1)[known]))
    exact = table.double().index_add(0, tokens[known], rows[known].double())
    tied.add_rows(table, rows, tokens)
    torch.testing.assert_close(table.double(), exact, rtol=1e-6, atol=2e-5)


def loss(head: Any, table: Tensor, positions: Tensor, tokens: Tensor, one: bool, copy: Tensor | None = None) -> Tensor:
    if one:
        rows, again = tied.tied(table, positions, tokens)
    else:
        rows, again = F.embedding(tokens, table) + positions[: tokens.shape[1]], table
    x = rows.flatten(0, 1).tanh() * 2
    made: Tensor = head(x, again, tokens.flatten().roll(-1), vocab=VOCAB, **({"copy": copy} if one else {}))
    return 3 * made


@pytest.mark.parametrize("place", ["plain", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", ["chunked", "fp8"])
def test_the_gradient_is_autograds(name: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    table, places, tokens = draw(60, prepare(place, monkeypatch))
    head, tokens = linear_cross_entropy.load(name).forward, tokens.view(4, 15)
    gradients = []
    for one in (True, False):
        leaf, positions = table.clone().requires_grad_(), places[:20].clone().requires_grad_()
        with torch.autocast(table.device.type, torch.bfloat16):
            value = loss(head, leaf, positions, tokens, one)
        first, where = torch.autograd.grad(value, (leaf, positions), retain_graph=True)
        second, again = torch.autograd.grad(value, (leaf, positions))
        assert torch.equal(first, second)
        assert torch.equal(where, again)
        gradients.append((value.detach(), first, where))
    (mine, ours, ours_where), (wanted, theirs, theirs_where) = gradients
    assert torch.equal(mine, wanted)
    assert ours_where[:15].any(1).all()
    assert torch.equal(ours_where, theirs_where)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6 * ours.abs().max().item())
    assert not ours[VOCAB:].any()
    assert ours[tokens.flatten()].any(1).all()


def test_a_gradient_that_was_expanded_has_room_for_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    table, positions, tokens = draw(60, prepare("plain", monkeypatch))
    leaf = table.clone().requires_grad_()
    rows, again = tied.tied(leaf, positions, tokens.view(4, 15))
    (rows.sum() + again.sum()).backward()
    assert torch.equal(leaf.grad, 1 + tokens.bincount(minlength=len(table)).float()[:, None].expand_as(table))


@pytest.mark.parametrize("name", ["chunked", "fp8"])
def test_a_copy_is_multiplied_and_the_weight_has_the_gradient(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, as the products made it, where a bf16 leaf's would be rounded."""
    table, positions, tokens = draw(60, prepare("plain", monkeypatch))
    head, tokens = linear_cross_entropy.load(name).forward, tokens.view(4, 15)
    copy = table.bfloat16().requires_grad_()
    found = []
    for given in (None, copy):
        leaf = table.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            value = loss(head, leaf, positions, tokens, True, given)
        value.backward()
        found.append((value.item(), leaf.grad))
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])  # type: ignore[arg-type]
    assert copy.grad is None
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        even = loss(head, table, positions, tokens, True, copy * 0)
        assert even.item() == pytest.approx(3 * torch.tensor(VOCAB).log().item())
    with pytest.raises(ValueError, match=r"copy \(63, 48\) of a weight \(64, 48\)"):
        head(torch.zeros(2, D), table, torch.zeros(2, dtype=torch.int64), vocab=VOCAB, copy=table[1:])


class Given(torch.autograd.Function):
    """A head whose gradient is a buffer that it gives away."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, buffer: Tensor) -> Tensor:
        ctx.save_for_backward(buffer)
        ctx.shape = x.shape
        return x.sum()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        return dy.expand(ctx.shape), *ctx.saved_tensors, None


def test_one_table_is_made_and_one_of_two_users_is_enough() -> None:
    table, positions, tokens = draw(30, "cpu")
    tokens = tokens.view(2, 15)
    counts = torch.bincount(tokens.flatten(), minlength=PADDED)[:, None]
    leaf = table.clone().requires_grad_()
    rows, again = tied.tied(leaf, positions, tokens)
    assert torch.equal(rows, table[tokens] + positions[:15])
    assert torch.equal(again, table)
    buffer = torch.ones_like(table)
    made, there = Given.apply(rows, again, buffer), buffer.data_ptr()
    del buffer
    made.backward()
    assert leaf.grad is not None
    assert leaf.grad.data_ptr() == there
    assert torch.equal(leaf.grad, (1 + counts).float().expand_as(table))
    for which, wanted in ((0, counts.float().expand_as(table)), (1, torch.ones_like(table))):
        leaf = table.clone().requires_grad_()
        where = positions.clone().requires_grad_(which == 0)
        tied.tied(leaf, where, tokens)[which].sum().backward()
        assert (where.grad is None) == (which == 1)
        assert torch.equal(leaf.grad, wanted)  # type: ignore[arg-type]
