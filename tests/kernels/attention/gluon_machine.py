"""A processor for Gluon's attention kernels: their own functions as Python threads, on barriers as sm_90's are."""

import functools
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
from barriers import Barrier, Threads, ran
from triton.experimental.gluon import language
from triton.runtime.jit import JITFunction

from te_bench.kernels.attention.hopper import (
    backward_fused,
    backward_keys,
    backward_rows,
    forward,
    fp8_backward,
    fp8_forward,
    parts,
)
from te_bench.kernels.attention.hopper.launch import Tiling

KERNELS = parts, forward, backward_rows, backward_keys, backward_fused, fp8_forward, fp8_backward
ROWS = 64
LATE = 1e-3  # seconds


class Place:
    """Of a block in shared memory: what was last copied there, and who reads it."""

    holds: Any = None
    readers = 0
    leaving = False
    dtype = None
    halves: "Room | None" = None  # other blocks in its memory

    def __init__(self) -> None:
        self.stored = list[Any]()  # since the last store to global memory

    def permute(self, _: Any) -> "Place":
        return self

    def slice(self, *_: Any, dim: int = 0) -> "Place":
        return self

    def index(self, _: int) -> "Place":
        return self

    def _reinterpret(self, *_: Any) -> "Place":
        return self


class Room:
    dtype = None

    def __init__(self, of: list[Any], rows: int = 0, columns: int = 64) -> None:
        self.of, self.shape = of, (len(of), 1, 1, rows, columns)

    def index(self, i: int) -> Any:
        return self.of[i]


class Number:
    """Whatever is no product."""

    type, shape = types.SimpleNamespace(layout=None), (ROWS,)

    def _same(self, *_: Any) -> "Number":
        return self

    __getitem__ = __add__ = __radd__ = __sub__ = __mul__ = __rmul__ = __truediv__ = __le__ = __lt__ = _same


class Sum:
    """Of products: what those that are over have read, and how many are under way."""

    type, shape = types.SimpleNamespace(layout=None), (ROWS, ROWS)

    def __init__(self, read: tuple[Any, ...] = ()) -> None:
        self.read, self.under_way = read, 0

    def done(self) -> tuple[Any, ...]:
        assert not self.under_way, "taken before it was there"
        return self.read

    def __mul__(self, other: Any) -> "Sum":
        return Sum(self.done() + (other.done() if isinstance(other, Sum) else ()))

    __add__ = __sub__ = __mul__

    def to(self, _: Any) -> "Sum":
        return Sum(self.done())

    def __getitem__(self, _: Any) -> "Sum":
        return self


class Machine(Threads):
    """Stand-ins for what the kernels take from Gluon; `slow` may be a tensor, whose blocks then come late.

    What a thread has stored, the tensor core and TMA see from its fence on. found: what goes to global memory, and where.
    """

    def __init__(self, slow: str = "") -> None:
        super().__init__(slow)
        self.own, self.unseen = threading.local(), dict[Place, Any]()
        self.found = list[Any]()
        self.both = Barrier()
        self.both.count = self.both.pending = 2

    def barriers(self, count: int, arrivals: int) -> Room:
        made = Room([Barrier() for _ in range(count)])
        for barrier in made.of:
            barrier.count = barrier.pending = arrivals
        return made

    def meet(self) -> None:
        parity = self.own.__dict__.get("met", 0)
        self.own.met = parity ^ 1
        self.arrive(self.both)
        self.wait(self.both, parity)

    def fence(self) -> None:
        self.do(lambda: [self.unseen.pop(place, None) for place in self.own.__dict__.pop("unseen", [])])

    def load(self, desc: Any, at: list[int], barrier: Barrier, place: Place) -> None:
        def landed() -> None:
            assert place.readers == 0, "filled while a product reads it"
            assert not place.leaving, "filled while a store reads it"
            place.holds = (desc.name, *at)
            barrier.bytes -= desc.block_type.nbytes
            barrier.settle()

        def late() -> None:
            try:
                self.do(landed)
            except AssertionError as error:
                self.fail(error)

        if desc.name == self.slow:
            threading.Timer(LATE, late).start()
        else:
            self.do(landed)

    def store(self, place: Place, x: Sum) -> None:
        for part in (place, *(place.halves.of if place.halves else ())):
            assert part.readers == 0, "written while a product reads it"
            assert not part.leaving, "written while a store reads it"
            self.unseen[part] = self.own
            self.own.__dict__.setdefault("unseen", []).append(part)
            self.do(lambda part=part: setattr(part, "holds", x.done()))  # type: ignore[misc]
        place.stored.append(x.done())

    def leave(self, desc: Any, at: list[int], place: Place) -> None:
        assert place not in self.unseen, "TMA may read what was there before"
        for part in (place, *(place.halves.of if place.halves else ())):
            part.leaving = True
            self.stores().append(part)
        left, place.stored = (desc.name, *at, *place.stored), []
        if at[2] < desc.limit:
            self.do(lambda: self.found.append(left))

    def add(self, desc: Any, at: list[int], place: Place) -> None:
        self.leave(desc, at, place)

    def stores(self) -> list[Place]:
        found: list[Place] = self.own.__dict__.setdefault("stores", [])
        return found

    def store_wait(self, pending: int) -> None:
        assert pending == 0
        self.do(lambda: None)  # time in which what is told too early is taken at its word
        while self.stores():
            self.stores().pop().leaving = False

    def multiply(self, a: Place | Sum, b: Place, acc: Sum, *, use_acc: bool = True, is_async: bool) -> Sum:
        assert is_async
        assert not {a, b} & self.unseen.keys(), "the tensor core may see what was there before"
        result = acc if use_acc else Sum()
        result.under_way += 1
        read = [x for x in (a, b) if isinstance(x, Place)]
        for place in read:
            place.readers += 1
        what = a.done() if isinstance(a, Sum) else (a.holds,)
        self.own.__dict__.setdefault("products", []).append((result, read, (what, b.holds)))
        return result

    def finish(self, pending: int, deps: tuple[Sum, ...]) -> Any:
        self.do(lambda: None)
        products = self.own.__dict__.setdefault("products", [])
        while len(products) > pending:
            result, read, what = products.pop(0)
            for place in read:
                place.readers -= 1
            result.read += (what,)
            result.under_way -= 1
        return deps[0] if len(deps) == 1 else deps


class Shape:
    """batch, heads, heads of keys, rows, keys, causal."""

    def __init__(self, batch: int, heads: int, kv_heads: int, rows: int, keys: int, causal: bool) -> None:
        self.batch, self.heads, self.rows, self.keys, self.causal = batch, heads, rows, keys, causal
        self.group, self.kv_heads = heads // kv_heads, kv_heads

    def sizes(self, p: Tiling, *, of_keys: bool, near: int) -> tuple[int, ...]:
        pairs = self.batch * (self.kv_heads if of_keys else self.heads)
        blocks = -(-(self.keys if of_keys else self.rows) // (ROWS * p.warpgroups))
        lengths = self.rows, self.keys, self.heads, self.group
        return *lengths, pairs, blocks, min(near, pairs), *divmod(blocks * pairs, 2)

    def keys_of(self, row: int, at_once: int) -> list[int]:
        """The first keys of the blocks that rows from `row` see, from the last on."""
        end = min(self.keys, row + ROWS) if self.causal else self.keys
        return list(range(0, end, at_once))[::-1]


def in_python(
    patch: pytest.MonkeyPatch,
    machine: Machine,
    room: Callable[[list[int]], Place],
    program: int,
    programs: int,
    words: dict[str, Any],
    stubs: dict[str, Any],
) -> None:
    """The kernels' functions become Python's. words: of Gluon's language; stubs: in place of what is the GPU's."""

    def rooms(shape: list[int]) -> Room:
        return Room([room(shape[-2:]) for _ in range(shape[0])], *shape[-2:])

    shared = dict[Place, Room]()

    def halves(place: Place, _: Any) -> Room:
        place.halves = shared.setdefault(place, rooms([2, ROWS, 128]))  # one for all threads
        return place.halves

    def specialize(calls: list[Any], warps: list[int], registers: list[int]) -> None:
        assert warps == [4] * (len(calls) - 2) + [1], "the last one fetches"
        assert len(set(registers[:-1])) == 1
        names = [*map(str, range(len(calls) - 1)), "fetch"]
        ran(machine, {name: functools.partial(call, *given) for name, (call, given) in zip(names, calls, strict=True)})

    of_gpu = ("SliceLayout", "DotOperandLayout", "SwizzledSharedLayout", "BlockedLayout", "NVMMASharedLayout")
    gl = {
        **dict.fromkeys((*of_gpu, "static_assert"), lambda *_: None),
        **dict.fromkeys(("float32", "int64", "uint8", "float8e4nv")),
        "NVMMADistributedLayout": lambda *given: types.SimpleNamespace(instr_shape=given[2]),
        "cdiv": lambda x, y: -(-x // y), "program_id": lambda _: program, "num_programs": lambda _: programs,
        "static_range": range, "warp_specialize": specialize, "allocate_shared_memory": lambda _, shape, __: rooms(shape),
    }  # fmt: skip
    waits = types.SimpleNamespace(wait=machine.wait, arrive=machine.arrive, expect=machine.expect)
    copies = types.SimpleNamespace(
        async_copy_global_to_shared=machine.load,
        async_copy_shared_to_global=machine.leave,
        store_wait=machine.store_wait,
    )
    as_it_is = ("as_matrix", "_as_lines", "round_to", "widen", "as_operand", "hold_back")
    values = {
        "gl": types.SimpleNamespace(**gl | words), "mbarrier": waits, "tma": copies, "make_barriers": machine.barriers,
        "allocate": lambda desc, count: rooms([count, *desc.block_type.shape[2:]]), "_split_dv_stage": halves,
        "fence_async_shared": machine.fence, "meet": machine.meet, "add_to_global": machine.add,
        "warpgroup_mma": machine.multiply, "warpgroup_mma_wait": machine.finish,
        **dict.fromkeys(as_it_is, lambda x, *_: x),
    } | stubs  # fmt: skip
    for module in KERNELS:
        for name, value in list(vars(module).items()):
            if name in values:
                patch.setattr(module, name, values[name])
            elif isinstance(value, JITFunction):
                patch.setattr(module, name, value.fn)
            elif isinstance(value, language.constexpr):
                patch.setattr(module, name, value.value)
