"""What is counted of a call's collectives."""

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from te_bench.experiments.instruments import collectives


def test_flex_attention_that_is_compiled_within_is_followed() -> None:
    q = torch.randn(1, 1, 16, 16)
    assert collectives.of_call(lambda: torch.compile(flex_attention)(q, q, q)) == []
    assert collectives.of_call(lambda: q + q) == []


def test_compiled_code_runs_as_it_is_while_its_collectives_are_seen() -> None:
    ran = []

    def backend(graph: Any, inputs: Any) -> Any:
        def compiled(*given: Any) -> Any:
            ran.append(graph)
            return graph(*given)

        return compiled

    def mean(x: Tensor) -> Tensor:
        total: Tensor = funcol.all_reduce(x, "sum", dist.group.WORLD)
        return total / 2

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        call = torch.compile(mean, backend=backend)
        call(torch.ones(4))
        ran.clear()
        seen = collectives.of_call(lambda: call(torch.ones(4)))
    finally:
        dist.destroy_process_group()
    assert len(ran) == 1
    assert seen == [{"name": "all_reduce", "dtype": "float32", "times": 1, "bytes": 16}]


def test_a_collective_of_several_dtypes_is_counted_by_dtype() -> None:
    """As FP8 and its blocks' scales are gathered in one."""
    sent = [torch.zeros(8, dtype=torch.uint8), torch.zeros(3)]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        whole = list(map(torch.empty_like, sent))
        group = dist.group.WORLD
        assert group is not None
        seen = collectives.of_call(lambda: group.allgather_into_tensor_coalesced(whole, sent).wait())
    finally:
        dist.destroy_process_group()
    name = {"name": "allgather_into_tensor_coalesced", "times": 1}
    assert seen == [name | {"dtype": "float32", "bytes": 12}, name | {"dtype": "uint8", "bytes": 8}]
