"""What torch.compile sees of an attention backend."""

from collections.abc import Callable, Sequence

import torch
from test_contract import gradients
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

from te_bench.kernels.attention import Backend


def operators(backend: Backend, tensors: Sequence[Tensor]) -> list[list[str]]:
    """Attention's operators in the forward and in the backward graph, whose results are those without torch.compile."""
    graphs: list[list[str]] = []

    def inspect(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., object]:
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return backend.forward(q, k, v, causal=True, scale=0.25)

    compiled = torch.compile(call, backend=aot_autograd(fw_compiler=inspect), fullgraph=True)
    got, plain = gradients(compiled, tensors), gradients(call, tensors)
    assert all(torch.equal(a, b) for a, b in zip(got, plain, strict=True))
    return [[name for name in graph if "attention" in name] for graph in graphs]
