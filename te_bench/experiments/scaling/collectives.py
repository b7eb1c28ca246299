"""Seconds of NCCL's collectives: t = a + f * S / busbw, for NVIDIA GPUs with NVLink in a node and a NIC each.

S is the whole tensor's bytes, f the share that a rank sends, and busbw the "bus bandwidth" of nccl-tests (PERFORMANCE.md).
The latencies and the protocols' bandwidths are those of NCCL's tuner (src/graph/tuning.cc, repeated in torch's
_inductor/comm_analysis.py). The bandwidths of large messages were measured by others, each with its source.
"""

import math
from dataclasses import dataclass
from itertools import pairwise

GB, MICROSECOND = 1e9, 1e-6
GATHER, REDUCE = "gather", "reduce"  # an all-gather or a reduce-scatter; an all-reduce
LL, LL128, SIMPLE = "LL", "LL128", "Simple"

#: Bytes/s of a ring of 8 GPUs on NVLink, H100 or H200: 350 to 370 GB/s (github.com/NVIDIA/nccl, issues 1281 and 1455).
NVLINK = 360 * GB
#: {bytes of an all-reduce in a node of 8 H200: bus bandwidth, GB/s} (Stas Bekman, ml-engineering; above 450 it is NVLS).
IN_NODE = {2**15: 3.2, 2**20: 75.0, 2**24: 256.0, 2**26: 369.0, 2**28: 442.0, 2**34: 482.0}
#: {nodes: share of the links' 400 GB/s a node}, for large messages: reduce-scatter at 360 to 260 GB/s (nccl, issue 1229).
OF_LINK = {4: 0.90, 8: 0.8625, 16: 0.80, 32: 0.75, 64: 0.70, 128: 0.65}

#: NCCL's tuner, microseconds: a collective's fixed time, and the time of each step on NVLink and between nodes.
BASE = {"ring": {LL: 6.6, LL128: 14.0, SIMPLE: 8.4}, "tree": {LL: 6.8, LL128: 14.0, SIMPLE: 8.4}}
ON_NVLINK = {"ring": {LL: 0.6, LL128: 1.9, SIMPLE: 3.4}, "tree": {LL: 0.6, LL128: 1.25, SIMPLE: 4.0}}
BETWEEN_NODES = {"ring": {LL: 2.7, LL128: 4.0, SIMPLE: 14.0}, "tree": {LL: 5.0, LL128: 8.5, SIMPLE: 14.0}}
#: The least time of a step on NVLink in a collective that spans nodes.
NET_OVERHEAD = {LL: 1.0, LL128: 1.0, SIMPLE: 3.0}
#: The most that protocol LL moves, GB/s: within a node of Hopper GPUs, over two nodes, over more.
MOST_OF_LL = (141.0, 39.0, 20.4)


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The ranks of a collective: `local` of them on each node; `link`: bytes/s from each GPU to other nodes."""

    ranks: int
    local: int
    link: float

    @property
    def nodes(self) -> int:
        return -(-self.ranks // self.local)

    @property
    def busbw(self) -> float:
        """Bytes/s of large messages in a ring: each GPU's NIC carries its share, NVLink the whole."""
        return NVLINK if self.nodes == 1 else min(NVLINK, self.local * self.link * of_link(self.nodes))


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """The cost of a collective: seconds, the part of them that no bandwidth shortens, and the bytes that a rank sends."""

    seconds: float = 0.0
    latency: float = 0.0
    sent: float = 0.0

    def __add__(self, other: "Collective") -> "Collective":
        return Collective(
            seconds=self.seconds + other.seconds, latency=self.latency + other.latency, sent=self.sent + other.sent
        )

    def times(self, count: float) -> "Collective":
        return Collective(seconds=self.seconds * count, latency=self.latency * count, sent=self.sent * count)


def of_link(nodes: int) -> float:
    """Return the share of the links' bandwidth that a collective over `nodes` reaches: measured for 4 to 128, in log2."""
    known = sorted(OF_LINK)
    if nodes <= known[0]:
        return OF_LINK[known[0]]
    below, above = next(((a, b) for a, b in pairwise(known) if nodes <= b), (known[-2], known[-1]))
    share = math.log2(nodes / below) / math.log2(above / below)
    return max(0.1, OF_LINK[below] + share * (OF_LINK[above] - OF_LINK[below]))


def collective(kind: str, size: float, group: Group) -> Collective:
    """Return an all-gather or reduce-scatter (GATHER) or all-reduce (REDUCE) of `size` bytes by its fastest algorithm."""
    n = group.ranks
    if n == 1 or size <= 0:
        return Collective()
    sent = (2 if kind == REDUCE else 1) * (n - 1) / n * size
    if kind == REDUCE and group.nodes == 1:
        seconds, latency = _all_reduce_in_node(size, sent), _all_reduce_in_node(1, 0)
        return Collective(seconds=max(seconds, latency), latency=latency, sent=sent)
    protocols = (LL, LL128, SIMPLE) if group.nodes == 1 else (LL, SIMPLE)  # LL128 needs NVLink's ordering of writes
    ways = [_ring(kind, sent, group, protocol) for protocol in protocols]
    if kind == REDUCE:
        ways += [_tree(size, group, protocol) for protocol in protocols]
    seconds, latency = min(ways)
    return Collective(seconds=seconds, latency=latency, sent=sent)


def _all_reduce_in_node(size: float, sent: float) -> float:
    """Interpolate the measured bandwidths in log-log; messages below the smallest measured size take equally long."""
    sizes = sorted(IN_NODE)
    if size <= sizes[0]:
        return 1.75 * sizes[0] / (IN_NODE[sizes[0]] * GB)  # 2 (n - 1) / n for the 8 measured GPUs
    if size >= sizes[-1]:
        return sent / (IN_NODE[sizes[-1]] * GB)
    below, above = next((a, b) for a, b in pairwise(sizes) if size <= b)
    share = math.log(size / below) / math.log(above / below)
    return sent / (IN_NODE[below] ** (1 - share) * IN_NODE[above] ** share * GB)


def _ring(kind: str, sent: float, group: Group, protocol: str) -> tuple[float, float]:
    """Return (seconds, latency) of n - 1 steps, twice as many for an all-reduce; nodes - 1 of the steps leave a node."""
    rounds = 2 if kind == REDUCE else 1
    across = group.nodes - 1
    inside = group.ranks - 1 - across
    steps = inside * _step("ring", protocol, group) + across * BETWEEN_NODES["ring"][protocol]
    latency = (BASE["ring"][protocol] + rounds * steps) * MICROSECOND
    return latency + sent / _bandwidth(protocol, group, simple=1.0, ll=0.5), latency


def _tree(size: float, group: Group, protocol: str) -> tuple[float, float]:
    """Return (seconds, latency) of one pass up and down: a chain in each node, a double binary tree over nodes."""
    steps = (group.local - 1) * _step("tree", protocol, group)
    steps += math.floor(math.log2(group.nodes)) * BETWEEN_NODES["tree"][protocol]
    latency = (BASE["tree"][protocol] + 2 * steps) * MICROSECOND
    return latency + 2 * size / _bandwidth(protocol, group, simple=0.92, ll=1 / 3.8), latency


def _step(algorithm: str, protocol: str, group: Group) -> float:
    overhead = NET_OVERHEAD[protocol] if group.nodes > 1 else 0.0
    return max(ON_NVLINK[algorithm][protocol], overhead)


def _bandwidth(protocol: str, group: Group, *, simple: float, ll: float) -> float:
    """Return the part of the large messages' bandwidth that a protocol reaches."""
    if protocol == LL:
        return min(ll * group.busbw, MOST_OF_LL[min(group.nodes, 3) - 1] * GB)
    return (simple if protocol == SIMPLE else 120 / 128) * group.busbw
