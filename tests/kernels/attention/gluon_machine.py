"""A processor for Gluon's attention kernels: their own functions as Python threads, on barriers as sm_90's are."""

import threading
import types
from typing import Any

from barriers import Barrier, Threads

from te_bench.kernels.attention.hopper.launch import Plan

ROWS = 64
LATE = 1e-3  # seconds
#: Functions of hopper.parts that run as they are, but in Python.
PARTS = ("count_tiles", "next_stage", "previous_stage", "count_key_blocks", "fetch", "take_turn", "pass_turn")


class Place:
    """Of a block in shared memory: what was last copied there, and who reads it."""

    holds: Any = None
    readers = 0
    leaving = False
    dtype = None

    def permute(self, _: Any) -> "Place":
        return self

    def slice(self, *_: Any, dim: int = 0) -> "Place":
        return self

    def index(self, _: int) -> "Place":
        return self

    def _reinterpret(self, *_: Any) -> "Place":
        return self

    def load(self, _: Any) -> "Sum":
        return Sum((self.holds,))

    def store(self, x: "Sum") -> None:
        assert self.readers == 0, "written while a product reads it"
        x.done()
        self.holds = "a result"


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

    def __add__(self, other: "Sum") -> "Sum":
        return Sum(self.done() + other.done())

    def __sub__(self, _: Any) -> "Sum":
        return Sum(self.done())

    def to(self, _: Any) -> "Sum":
        return Sum(self.done())

    def __getitem__(self, _: Any) -> "Sum":
        return self


class Machine(Threads):
    """Stand-ins for what the kernels take from Gluon; `slow` may be a tensor, whose blocks then come late."""

    def __init__(self, slow: str) -> None:
        super().__init__(slow)
        self.own = threading.local()

    def barriers(self, count: int, arrivals: int) -> Room:
        made = Room([Barrier() for _ in range(count)])
        for barrier in made.of:
            barrier.count = barrier.pending = arrivals
        return made

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

    def leave(self, place: Place) -> None:
        place.leaving = True
        self.stores().append(place)

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

    def sizes(self, p: Plan, *, of_keys: bool, near: int) -> tuple[int, ...]:
        pairs = self.batch * (self.kv_heads if of_keys else self.heads)
        blocks = -(-(self.keys if of_keys else self.rows) // (ROWS * p.warpgroups))
        lengths = self.rows, self.keys, self.heads, self.group
        return *lengths, pairs, blocks, min(near, pairs), *divmod(blocks * pairs, 2)

    def keys_of(self, row: int, at_once: int) -> list[int]:
        """The first keys of the blocks that rows from `row` see, from the last on."""
        end = min(self.keys, row + ROWS) if self.causal else self.keys
        return list(range(0, end, at_once))[::-1]
