"""The quickened interpreter is in force, computes what Triton's own does, and leaves triton.language as it found it."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import interpreter as quickened
import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="nothing is interpreted on a GPU")


@triton.jit
def twice(x):  # type: ignore[no-untyped-def]
    return x + x


@triton.jit
def four_times_kernel(x, y, N: tl.constexpr, BROKEN: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * N + tl.arange(0, N)
    if BROKEN:
        raise ValueError("on purpose")
    tl.store(y + at, twice(twice(tl.load(x + at).to(tl.float32))))


def four_times(broken: bool = False) -> torch.Tensor:
    x = torch.arange(32, dtype=torch.bfloat16)
    y = torch.empty(32)
    four_times_kernel[(2,)](x, y, 16, broken)
    return y


def language() -> list[dict[str, Any]]:
    return [dict(vars(part)) for part in (tl, tl.core, tl.math, tl.tensor, tl.dtype)]


@pytest.mark.parametrize("broken", [False, True])
def test_a_launch_leaves_the_language_as_it_was(broken: bool) -> None:
    four_times()  # Triton's first leaves as a tensor's own what it had inherited
    before = language()
    if broken:
        with pytest.raises(interpreter.InterpreterError, match="on purpose"):
            four_times(broken=True)
    assert torch.equal(four_times(), 4.0 * torch.arange(32))
    assert language() == before


FORMATS = [tl.float8e5, tl.float8e4nv, tl.float16, tl.bfloat16, tl.float32]
PAIRS = [(a, b) for a in FORMATS for b in FORMATS if a.primitive_bitwidth != b.primitive_bitwidth]


@pytest.mark.parametrize("rounding", [None, interpreter._ir.ROUNDING_MODE.RTNE])
@pytest.mark.parametrize(("source", "target"), PAIRS, ids=str)
@pytest.mark.parametrize("turned", [False, True])
def test_a_conversion_is_tritons_own_bit_for_bit(source, target, rounding, turned):
    """Of every number where there are at most 65,536; with subnormal ones, infinities and NaN, and without."""
    convert = interpreter._convert_float
    bits = source.primitive_bitwidth
    if bits == 32:
        every = np.random.default_rng(0).integers(0, 2**32, 4096, dtype=np.uint32)
        every[:6] = 0, 1, 0x007FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000
    else:
        every = np.arange(2**bits, dtype=f"uint{bits}")
    normal = every[6:] if bits == 32 else every
    for given in (every, normal[(normal & 0x7F800000) != 0] if bits == 32 else normal[:1]):
        x = given.reshape(-1, 1).T if turned else given
        ours, right = (f(x, source, target, rounding) for f in (convert, convert.__wrapped__))
        assert ours.dtype == right.dtype
        assert ours.shape == right.shape
        assert np.array_equal(ours, right)


@pytest.fixture
def in_a_launch() -> Iterator[None]:
    scope = interpreter._patch_lang(four_times_kernel.fn)
    yield
    scope.restore()


def described(one: Any) -> Any:
    """What can be compared: constants have no equality that is True or False, and types of blocks compare by two things."""
    if isinstance(one, tl.tensor):
        return *map(described, (one.type, one.dtype, one.shape, one.numel, one.handle.dtype)), one.handle.data.tolist()
    if isinstance(one, tl.core.tuple | tuple | list):
        return type(one), [described(value) for value in one], str(getattr(one, "type", None))
    if isinstance(one, tl.core.base_type):
        return type(one), {name: described(value) for name, value in vars(one).items()}
    return type(one), one.value if isinstance(one, tl.constexpr) else one


def done(function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return described(function(*arguments))
    except Exception as error:
        return type(error), str(error)


def made(of: type, init: Callable[..., None], *arguments: Any) -> Any:
    one = object.__new__(of)
    init(one, *arguments)
    return one


SCALARS = [tl.int1, tl.int32, tl.uint32, tl.int64, tl.float8e5, tl.float16, tl.bfloat16, tl.float32]
POINTER = tl.pointer_type(tl.float32)
SIZES = [[], [1], [4], [2, 4], [1, 4], [2, 1], [3], [2**21], [4.0], [True], [tl.constexpr(2), 4], [tl.constexpr(4.0)]]


@pytest.mark.parametrize("sizes", [*SIZES, tl.core.tuple([2, 4]), tl.core.tuple([tl.constexpr(4)])], ids=str)
def test_a_type_of_a_block_is_tritons_own(sizes: Any) -> None:
    init = tl.block_type.__init__
    for element in (tl.int32, tl.float16, POINTER, tl.pointer_type(tl.int32), tl.pointer_type(tl.float32, const=True)):
        for _ in range(2):  # of a shape that is known by then as well
            ours, right = (done(made, tl.block_type, f, element, sizes) for f in (init, init.__wrapped__))
            assert ours == right


@pytest.mark.parametrize("sizes", [[], [1], [4], [2, 4]], ids=str)
@pytest.mark.parametrize("element", [tl.int32, tl.float16, POINTER], ids=str)
def test_a_tensor_is_tritons_own(element: Any, sizes: list[int]) -> None:
    init, handle = tl.tensor.__init__, interpreter.TensorHandle(np.zeros(sizes or [1], np.int16), element)
    kind = tl.block_type(element, sizes) if sizes else element
    for _ in range(2):
        ours, right = (done(made, tl.tensor, f, handle, kind) for f in (init, init.__wrapped__))
        assert ours == right


def tensor(element: Any, sizes: list[int]) -> tl.tensor:
    data = np.ones(sizes or [1], interpreter._get_np_dtype(element))
    return tl.tensor(interpreter.TensorHandle(data, element), tl.block_type(element, sizes) if sizes else element)


SHAPES: list[tuple[list[int], list[int]]]
SHAPES = [([], []), ([], [4]), ([4], []), ([4], [4]), ([4], [8]), ([2, 4], [2, 4]), ([2, 4], [2, 1]), ([4], [2, 4])]
OPTIONS = [(), (True, True), (False, False, True, True)]  # of a product, a sum, a quotient


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("one", [*SCALARS, POINTER], ids=str)
def test_two_operands_become_what_they_become_in_tritons_own(one, options, in_a_launch):
    semantic = interpreter.interpreter_semantic
    check, broadcast = semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value
    for other in (*SCALARS, POINTER):
        for a, b in SHAPES:
            x, y = tensor(one, a), tensor(other, b)
            assert done(check, x, y, *options) == done(check.__wrapped__, semantic, x, y, *options)
            named = functools.partial(check, arithmetic_check=False)
            assert done(named, x, y) == done(check.__wrapped__, semantic, x, y, False, False, False)
            assert done(broadcast, x, y) == done(broadcast.__wrapped__, semantic, x, y)
    for number in (0, 3, -1, 0.5, True):
        for x in (tensor(one, []), tensor(one, [4])):
            assert done(check, x, number, *options) == done(check.__wrapped__, semantic, x, number, *options)


@pytest.mark.parametrize("one", [*SCALARS, POINTER], ids=str)
def test_types_compare_and_are_laid_out_as_tritons_own(one: Any) -> None:
    equal, array = tl.dtype.__eq__, interpreter._get_np_dtype
    for other in (*SCALARS, POINTER, tl.block_type(one, [4]), tl.constexpr(one), one.name, 4, None):
        assert equal(one, other) is equal.__wrapped__(one, other)
    for kind in (one, tl.block_type(one, [4]), tl.pointer_type(one), tl.block_type(tl.pointer_type(one), [4])):
        assert array(kind) == array.__wrapped__(kind)


def test_a_compiler_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """It shares classes with the interpreter, which a module may import where kernels are compiled."""
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    monkeypatch.delattr(interpreter, "quickened")
    before = interpreter.TritonSemantic.binary_op_type_checking_impl
    quickened.quicken()
    assert interpreter.TritonSemantic.binary_op_type_checking_impl is before
