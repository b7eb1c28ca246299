"""What of a trace's collectives nothing hides."""

from typing import Any

import pytest
import torch

from te_bench.experiments.instruments import communication, profiling
from te_bench.experiments.instruments.communication import COLLECTIVE, durations, exposed, since_all_began


@pytest.mark.parametrize(
    ("collectives", "others", "seconds"),
    [
        ([(0, 2)], [], 2),
        ([(0, 2)], [(0, 3)], 0),
        ([(0, 4)], [(1, 2), (1.5, 3)], 2),  # before and after two kernels that overlap
        ([(0, 2), (1, 4)], [(3, 5)], 3),  # two at a time count once
        ([(5, 6), (0, 1)], [(2, 3)], 2),
        ([], [(0, 1)], 0),
    ],
)
def test_a_collective_is_exposed_while_nothing_else_runs(collectives, others, seconds):
    assert exposed(collectives, others) == pytest.approx(seconds)


def test_rounding_exposes_no_more_of_a_collective_than_there_is() -> None:
    assert exposed([(0.0, 0.3)], [(0.5, 0.8)]) <= 0.3  # 0.3 + (0.8 - 0.5) - (0.8 - 0.5) is more
    assert exposed([(0.5, 0.8)], [(0.0, 0.3), (0.5, 0.8)]) == 0


def test_a_collective_begins_with_its_last_rank() -> None:
    """Rank 0 waits 3 s for the first gather, rank 1 one for the second; in between both reduce. Streams may overlap."""
    first = [("gather", 0.0, 4.0), ("reduce", 3.0, 6.0), ("gather", 7.0, 8.0)]
    second = [("gather", 10.0, 11.0), ("reduce", 9.0, 12.0), ("gather", 13.0, 15.0)]
    of_ranks = [durations(first), durations(second)]
    assert of_ranks[0] == {"gather": [4, 1], "reduce": [3]}
    assert since_all_began(first, of_ranks) == [(3, 4), (3, 6), (7, 8)]
    assert since_all_began(second, of_ranks) == [(9, 12), (10, 11), (14, 15)]


def test_a_step_s_time_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gather that waits 3 s for the other rank and then takes 1, half of it beside a product of 2.5 s. Three steps."""
    gather = "ncclDevKernel_AllGather_RING_LL"
    spans = [(name, 10 * i + a, 10 * i + b) for i in range(3) for name, a, b in ((gather, 0, 4), ("gemm", 3.5, 6))]
    monkeypatch.setattr(profiling, "kernel_spans", lambda _: spans)
    found = communication.of_steps(lambda: None, "cuda", lambda mine: [mine, {gather: [1.0] * 3}])
    assert found == pytest.approx({"compute_s": 2.5, "collectives_s": 1, "exposed_s": 0.5, "waiting_s": 3})
    assert communication.of_steps(lambda: None, "cpu", lambda mine: [mine]) == {}


def test_ranks_that_ran_unlike_often_keep_their_spans() -> None:
    first = [("gather", 0.0, 4.0), ("reduce", 5.0, 9.0)]
    of_ranks = [durations(first), {"gather": [1.0], "reduce": [1.0, 1.0]}]
    assert since_all_began(first, of_ranks) == [(3, 4), (5, 9)]
    assert since_all_began([("send", 0.0, 2.0)], [{"send": [2.0]}, {}]) == [(0, 2)]


def test_nccl_names_its_kernels() -> None:
    for name in (
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)",
        "ncclSymDevKernel_AllReduce_RSxLD_AGxSTMC",
    ):
        assert COLLECTIVE.match(name)
    assert not COLLECTIVE.match("nccl:all_reduce")  # an annotation, which spans kernels


def test_a_rank_without_memory_for_it_leaves_the_bandwidth_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """In every rank, for none may wait for another."""

    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    told: list[bool] = []
    assert communication.bandwidth("cpu", lambda mine: [told.append(mine), False]) is None
    monkeypatch.setattr(torch, "ones", full)
    assert communication.bandwidth("cpu", lambda mine: [told.append(mine), True]) is None
    assert told == [True, False]
