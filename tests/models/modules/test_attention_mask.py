"""Mask types, windows and padding against their definition, position by position."""

import itertools
from typing import Any

import pytest
import torch
from padded import README
from torch import Tensor

from te_bench.models.modules import attention_mask
from te_bench.models.modules.attention_mask import Sizes, Visible

CPU = torch.device("cpu")


def hidden(kind: str, sizes: Sizes, **options: object) -> Tensor:
    """(B, T, S): what `build` hides, its causal flag and its window spelt out."""
    causal, window, mask, empty = attention_mask.build(kind, sizes, CPU, **options)  # type: ignore[arg-type]
    out = torch.zeros(sizes.batch, 1, sizes.rows, sizes.keys, dtype=torch.bool)
    left, right = (-1, -1) if window is None else window
    if causal:
        out |= torch.ones(sizes.rows, sizes.keys, dtype=torch.bool).triu(1)
    if right >= 0:
        out |= torch.ones(sizes.rows, sizes.keys, dtype=torch.bool).triu(right + 1)
    if left >= 0:
        out |= torch.ones(sizes.rows, sizes.keys, dtype=torch.bool).tril(-left - 1)
    for part in (mask, empty):
        out = out if part is None else out | part
    return out[:, 0]


def by_definition(
    kind: str, sizes: Sizes, window: tuple[int, int], lengths: list[tuple[int, int]], bottom_right: bool
) -> Tensor:
    out = torch.zeros(sizes.batch, sizes.rows, sizes.keys, dtype=torch.bool)
    for b, i, j in itertools.product(range(sizes.batch), range(sizes.rows), range(sizes.keys)):
        rows, keys = lengths[b]
        seen = "padding" not in kind or (i < rows and j < keys)
        centre = i + keys - rows if bottom_right else i
        left, right = window
        if "causal" in kind:
            right = 0
        seen = seen and (left < 0 or j >= centre - left) and (right < 0 or j <= centre + right)
        out[b, i, j] = not seen
    return out


@pytest.mark.parametrize("window", [(-1, -1), (2, 0), (0, 0), (1, 2), (3, 0)])
@pytest.mark.parametrize("sizes", [Sizes(3, 3, 5, 5), Sizes(3, 3, 4, 7), Sizes(3, 3, 7, 4)], ids=str)
@pytest.mark.parametrize("kind", [kind for kind in attention_mask.TYPES if kind != "arbitrary"])
def test_every_type_hides_what_it_says(kind: str, sizes: Sizes, window: tuple[int, int]) -> None:
    rows, keys = torch.tensor([1, 3, 4]), torch.tensor([4, 2, 3])
    lengths = [(sizes.rows, sizes.keys)] * 3
    options: dict[str, object] = {"window_size": window}
    if "padding" in kind:
        query = (torch.arange(sizes.rows) >= rows[:, None])[:, None, None]
        key = (torch.arange(sizes.keys) >= keys[:, None])[:, None, None]
        options["attention_mask"] = (query, key)
        lengths = list(zip(rows.tolist(), keys.tolist(), strict=True))
    aligned = kind not in ("causal", "padding_causal")  # at the bottom right unless told
    assert torch.equal(hidden(kind, sizes, **options), by_definition(kind, sizes, window, lengths, aligned))
    if kind in ("no_mask", "padding"):
        told = hidden(kind, sizes, **options, bottom_right_diagonal=False)
        assert torch.equal(told, by_definition(kind, sizes, window, lengths, False))
    else:  # as in Transformer Engine, the type's own alignment is not to be overridden
        assert torch.equal(
            hidden(kind, sizes, **options, bottom_right_diagonal=not aligned), hidden(kind, sizes, **options)
        )


@pytest.mark.parametrize("kind", ["padding", "padding_causal", "padding_causal_bottom_right"])
def test_cumulative_lengths_stand_in_for_a_mask(kind: str) -> None:
    starts = torch.tensor([0, 3, 5, 9], dtype=torch.int32)
    sizes = Sizes(3, 3, 5, 5)
    by_mask = hidden(kind, sizes, attention_mask=README)
    assert torch.equal(hidden(kind, sizes, cu_seqlens=(starts, starts)), by_mask)


def test_plain_types_build_no_mask() -> None:
    long = Sizes(1, 3, 1 << 20, 1 << 20)  # a mask of it would be a tebibyte
    build = attention_mask.build
    assert build("no_mask", long, CPU, attention_mask=README) == Visible()  # ignored
    assert build("causal", long, CPU) == Visible(causal=True)
    assert build("causal", long, CPU, window_size=(-1, 0)) == Visible(causal=True)
    assert build("causal_bottom_right", long, CPU) == Visible(causal=True)
    assert build("causal", Sizes(1, 3, 5, 1 << 40), CPU) == Visible(causal=True)
    assert build("causal", long, CPU, attention_mask=README) == Visible(causal=True)


def test_windows_and_padding_build_no_mask_of_queries_and_keys() -> None:
    long = Sizes(1, 3, 1 << 20, 1 << 20)
    build = attention_mask.build
    assert build("causal", long, CPU, window_size=(255, 0)) == Visible(causal=True, window=(255, 0))
    assert build("no_mask", long, CPU, window_size=(3, 5)) == Visible(window=(3, 5))
    assert build("no_mask", long, CPU, window_size=(3, 0)) == Visible(causal=True, window=(3, 0))
    more = Sizes(1, 3, 1 << 20, (1 << 20) + 4)  # the last row stands at the last key
    assert build("causal_bottom_right", more, CPU) == Visible(window=(-1, 4))
    assert build("causal_bottom_right", more, CPU, window_size=(9, 0)) == Visible(window=(5, 4))
    padding = torch.zeros(1, 1, 1, 1 << 20, dtype=torch.bool)
    starts = torch.tensor([0, 5])
    given: list[dict[str, object]] = [{"attention_mask": padding}, {"cu_seqlens": (starts, starts)}]
    for kind, options in itertools.product(("padding", "padding_causal", "padding_causal_bottom_right"), given):
        extent = build(kind, long, CPU, window_size=(255, 0), **options)  # type: ignore[arg-type]
        assert (extent.causal, extent.window) == (True, (255, 0))
        assert extent.mask is not None
        assert extent.empty is not None
        assert (extent.mask.shape, extent.empty.shape) == (padding.shape, padding.mT.shape)


@pytest.mark.parametrize("shape", [(5,), (1, 5), (4, 1), (4, 5), (2, 1, 4, 5), (1, 3, 1, 5), (2, 3, 4, 1)], ids=str)
def test_an_arbitrary_mask_broadcasts(shape: tuple[int, ...]) -> None:
    mask = torch.rand(shape) < 0.5
    causal, window, built, empty = attention_mask.build("arbitrary", Sizes(2, 3, 4, 5), CPU, attention_mask=mask)
    assert not causal
    assert window is empty is None
    assert built is not None
    assert torch.equal(built.expand(2, 3, 4, 5), mask.expand(2, 3, 4, 5))


def test_an_arbitrary_mask_and_a_window() -> None:
    mask = torch.rand(2, 1, 5, 5) < 0.3
    window = hidden("no_mask", Sizes(2, 3, 5, 5), window_size=(1, 1))
    assert torch.equal(
        hidden("arbitrary", Sizes(2, 3, 5, 5), attention_mask=mask, window_size=(1, 1)), mask[:, 0] | window
    )


def test_a_causal_window_without_a_causal_type_is_none_and_says_so() -> None:
    with pytest.warns(UserWarning, match="no window"):
        assert attention_mask.check_window("no_mask", (-1, 0)) == (-1, -1)
    assert attention_mask.check_window("causal", (-1, -1)) == (-1, 0)
    assert attention_mask.check_window("causal", (4, 4)) == (4, 0)


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        ("casual", {}, "casual"),
        ("causal", {"window_size": (-2, 0)}, r"\(-2, 0\)"),
        ("no_mask", {"window_size": (-1, 3)}, r"\(-1, 3\)"),
        ("padding", {}, "needs attention_mask"),
        ("padding", {"cu_seqlens": (torch.arange(4), None)}, "needs attention_mask"),
        ("padding", {"cu_seqlens": (torch.arange(3), torch.arange(3))}, r"\(4,\), got \(3,\)"),
        ("padding", {"attention_mask": README.float()}, "torch.bool"),
        ("padding", {"attention_mask": README[:, 0, 0]}, r"\(3, 1, 1, 5\), got \(3, 5\)"),
        ("padding", {"attention_mask": README.to("meta")}, "is on meta"),
        ("arbitrary", {}, "needs attention_mask"),
        ("arbitrary", {"attention_mask": (README, README)}, "one bool tensor"),
        ("arbitrary", {"attention_mask": README[:2]}, r"\(2, 1, 1, 5\) does not broadcast"),
        ("arbitrary", {"attention_mask": torch.zeros(3, 2, 5, 5, dtype=torch.bool)}, r"\(3, 3, 5, 5\)"),
        ("arbitrary", {"attention_mask": torch.zeros(1, 3, 1, 5, 5, dtype=torch.bool)}, "does not broadcast"),
        ("arbitrary", {"attention_mask": README.int()}, "torch.bool"),
        ("padding", {"attention_mask": (README, README, README)}, "a pair for queries and keys; got 3 of them"),
        ("padding", {"attention_mask": (README,)}, "a pair for queries and keys; got 1 of them"),
        ("padding", {"attention_mask": [[False] * 5] * 3}, "a pair for queries and keys; got 3 of them"),
        ("padding", {"attention_mask": README.numpy()}, "a pair for queries and keys; got ndarray"),
        ("padding", {"attention_mask": (README, None)}, "of the keys must be a tensor of torch.bool .*, got NoneType"),
        (
            "padding",
            {"attention_mask": (README, README[:2])},
            r"of the keys must be \(3, 1, 1, 5\), got \(2, 1, 1, 5\)",
        ),
    ],
)
def test_what_is_wrong_is_named(kind: str, options: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        attention_mask.build(kind, Sizes(3, 3, 5, 5), CPU, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("starts", "reason"),
    [
        (torch.tensor([1, 3, 5, 9]), r"cu_seqlens_kv=\[1, 3, 5, 9\]: they start at 1, not 0; give 0 and then the sums"),
        (torch.tensor([0, 3, 2, 4]), r"=\[0, 3, 2, 4\]: sequence 1 would end at 2, before it begins at 3"),
        (torch.tensor([0, 3, 5, 15]), "sequence 2 would have 10 of 5 positions"),
        (torch.tensor([0, 0, 0, 6]), "sequence 2 would have 6 of 5 positions"),
        (torch.tensor([0, -1, 3, 5], dtype=torch.int32), "sequence 0 would end at -1, before it begins at 0"),
        (
            torch.tensor([0.0, 3.0, 5.0, 9.0]),
            r"cu_seqlens_kv must be a tensor of torch.int32 or torch.int64, got torch.f",
        ),
        (torch.tensor([False, True, True, True]), "int32 or torch.int64, got torch.bool"),
        ([0, 3, 5, 9], "int32 or torch.int64, got list"),
        (torch.tensor([[0, 3, 5, 9]]), r"cu_seqlens_kv must be \(4,\), got \(1, 4\)"),
        (torch.zeros(4, dtype=torch.int32, device="meta"), "cu_seqlens_kv is on meta, the query on cpu: move it"),
    ],
)
def test_impossible_cumulative_lengths_are_named(starts: Any, reason: str) -> None:
    sound = torch.tensor([0, 5, 5, 10], dtype=torch.int32)
    sizes = Sizes(3, 3, 5, 5)
    assert hidden("padding", sizes, cu_seqlens=(sound, sound))[1].all()  # a sequence of nothing, and full ones
    for _ in range(2):  # what was refused once is again
        with pytest.raises(ValueError, match=reason):
            attention_mask.build("padding", sizes, CPU, cu_seqlens=(sound, starts))
    with pytest.raises(ValueError, match=reason.replace("_kv", "_q")):
        attention_mask.build("padding", sizes, CPU, cu_seqlens=(starts, sound))


def test_cumulative_lengths_are_read_once_until_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    tolist = Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda self: reads.append(self) or tolist(self))
    starts = torch.tensor([0, 3, 5, 9])
    for sizes, number in ((Sizes(3, 3, 5, 5), 1), (Sizes(3, 3, 4, 4), 2)):
        for _ in range(3):
            attention_mask.build("padding", sizes, CPU, cu_seqlens=(starts, starts))
        assert len(reads) == number
    starts[3] = 90
    with pytest.raises(ValueError, match="85 of 4 positions"):
        attention_mask.build("padding", Sizes(3, 3, 4, 4), CPU, cu_seqlens=(starts, starts))


def test_cumulative_lengths_made_in_inference_mode_are_checked_too() -> None:
    with torch.inference_mode():
        starts = torch.tensor([0, 3, 5, 9])
        attention_mask.build("padding", Sizes(3, 3, 5, 5), CPU, cu_seqlens=(starts, starts))
        starts[3] = 4
        with pytest.raises(ValueError, match="would end at 4, before it begins at 5"):
            attention_mask.build("padding", Sizes(3, 3, 5, 5), CPU, cu_seqlens=(starts, starts))


def test_one_padding_mask_is_not_for_two_lengths() -> None:
    with pytest.raises(ValueError, match="5 queries and 6 keys"):
        attention_mask.build("padding", Sizes(3, 3, 5, 6), CPU, attention_mask=README)


@pytest.mark.parametrize("window", [4, (1, 2, 3), (1.5, 0), ("1", 0), (True, 0)])
def test_a_window_is_two_whole_numbers(window: Any) -> None:
    with pytest.raises(ValueError, match="two whole numbers"):
        attention_mask.check_window("causal", window)


@pytest.mark.parametrize("name", [None, 3])
def test_a_mask_type_is_one_of_the_names(name: Any) -> None:
    with pytest.raises(ValueError, match="is not possible: one of"):
        attention_mask.check_type(name)
