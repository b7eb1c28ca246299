"""What of a trace's collectives nothing hides."""

from typing import Any

import pytest
import torch

from te_bench.experiments.instruments import communication
from te_bench.experiments.instruments.communication import COLLECTIVE, exposed


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
