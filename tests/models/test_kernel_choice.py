"""Which backend runs: what is asked for, else the first that can; never another in silence."""

import contextlib
import dataclasses

import pytest
import torch

import te_bench.models as te
from te_bench.kernels import attention
from te_bench.kernels.attention import Backend, Problem
from te_bench.models import kernel_choice as module
from te_bench.models.kernel_choice import attention_kernel, choose, preference, report
from te_bench.models.modules.attention import DotProductAttention

H200 = Problem(
    batch=2,
    heads=4,
    length=64,
    head_dim=64,
    dtype="bf16",
    causal=True,
    dropout=0.0,
    device="cuda",
    capability=(9, 0),
)
ON_CPU = dataclasses.replace(H200, device="cpu", capability=None)


@pytest.mark.parametrize(
    ("problem", "name"),
    [
        (H200, "cudnn"),
        (dataclasses.replace(H200, capability=(8, 0)), "flash"),
        (dataclasses.replace(H200, capability=(7, 5)), "mem_efficient"),
        (dataclasses.replace(H200, head_dim=256), "flash"),
        (dataclasses.replace(H200, kv_heads=2), "cudnn"),
        (dataclasses.replace(H200, causal=False, mask=True), "mem_efficient"),
        (dataclasses.replace(H200, dtype="fp32"), "mem_efficient"),
        (dataclasses.replace(H200, dtype="fp32", head_dim=5), "math"),
        (dataclasses.replace(H200, dtype="fp64"), "math"),
        (ON_CPU, "flash"),
        (dataclasses.replace(ON_CPU, mask=True), "flash"),
        (dataclasses.replace(ON_CPU, dropout=0.1), "math"),
        (dataclasses.replace(ON_CPU, v_head_dim=32), "math"),
    ],
    ids=str,
)
def test_the_first_preference_that_can(problem: Problem, name: str) -> None:
    assert choose(problem) == name
    said = report(problem)
    assert said.chosen == name
    tried = preference(problem)
    assert all(earlier in said.reasons for earlier in tried[: tried.index(name)])
    assert name not in said.reasons
    assert str(said).startswith(f"{name} runs\n")


@pytest.mark.parametrize("name", ["math", "manual", "mem_efficient"])
def test_the_one_that_is_asked_for(name: str) -> None:
    with attention_kernel(name):
        assert choose(H200) == report(H200).chosen == name
    assert choose(H200) == "cudnn"


def test_the_innermost_counts_and_the_outer_comes_back() -> None:
    with attention_kernel("math"):
        with attention_kernel("manual"):
            with attention_kernel("manual"):
                pass
            assert choose(ON_CPU) == "manual"
        assert choose(ON_CPU) == "math"
        with pytest.raises(RuntimeError, match="inside"), attention_kernel("manual"):
            raise RuntimeError("inside")
        assert choose(ON_CPU) == "math"
    assert choose(ON_CPU) == "flash"


def test_a_recomputation_chooses_as_the_first_time() -> None:
    seen: list[str] = []
    x = torch.ones(2, requires_grad=True)
    for outer in (attention_kernel("math"), contextlib.nullcontext()):
        with outer:
            y = te.checkpoint(lambda x: seen.append(choose(ON_CPU)) or x.sin(), x)
        with attention_kernel("manual"):
            y.sum().backward()
            assert choose(ON_CPU) == "manual"
    assert seen == ["math", "math", "flash", "flash"]


def test_it_decorates_functions() -> None:
    @attention_kernel("manual")
    def chosen() -> str:
        return choose(ON_CPU)

    assert chosen() == chosen() == "manual"


def test_an_unknown_name_names_its_neighbours() -> None:
    with (
        pytest.raises(ValueError, match=r"unknown attention backend 'cuddn'\. Did you mean cudnn\?"),
        attention_kernel("cuddn"),
    ):
        pass
    assert module.current is None


def test_one_that_cannot_says_why_and_who_can() -> None:
    masked = dataclasses.replace(H200, mask=True)
    with attention_kernel("flash"):
        with pytest.raises(
            ValueError, match=r"'flash'.*FlashAttention-2 takes none.*Able: auto, manual, math, mem_efficient"
        ):
            choose(masked)
        assert report(masked).chosen is None
        assert "can't" in str(report(masked))


def test_what_is_asked_for_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def spied(name: str) -> Backend:
        real = attention.load(name)

        def forward(*args: object, **options: object) -> object:
            ran.append(name)
            return real.forward(*args, **options)

        return dataclasses.replace(real, forward=forward)

    monkeypatch.setattr(module, "backend", spied)
    layer, q = DotProductAttention(2, 16), torch.randn(8, 1, 2, 16)
    layer(q, q, q)
    with attention_kernel("math"):
        layer(q, q, q)
        with attention_kernel("manual"):
            layer(q, q, q)
        layer(q, q, q)
    assert ran == ["flash", "math", "manual", "math"]
    with attention_kernel("cudnn"), pytest.raises(ValueError, match="does not run on a CPU"):
        layer(q, q, q)
    assert len(ran) == 4


def test_compiled_code_follows_it_without_graph_breaks() -> None:
    layer = DotProductAttention(2, 16)
    q = torch.randn(8, 1, 2, 16)
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(graph.code)
        return graph

    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    expected = layer(q, q, q)
    torch.testing.assert_close(compiled(q, q, q), expected)
    with attention_kernel("manual"):
        torch.testing.assert_close(compiled(q, q, q), expected)
    torch.testing.assert_close(compiled(q, q, q), expected)
    torch._dynamo.reset()
    assert len(graphs) == 2
    assert "scaled_dot_product_attention" in graphs[0]
    assert "scaled_dot_product_attention" not in graphs[1]


@pytest.mark.gpu
@pytest.mark.parametrize("name", [None, "cudnn", "flash", "mem_efficient", "math", "manual"])
def test_the_kernels_that_ran_are_the_ones_asked_for(name: str | None) -> None:
    from te_bench.experiments.instruments.profiling import kernels_seen

    layer = DotProductAttention(4, 64)
    q, k, v = (torch.randn(128, 2, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    wanted = name or layer.backend_report(q, k, v).chosen
    assert wanted is not None
    if name is None and torch.cuda.get_device_capability()[0] == 9:
        assert wanted == "cudnn"

    def both() -> None:
        if name is None:
            layer(q, k, v).sum().backward()
            return
        with attention_kernel(name):
            layer(q, k, v).sum().backward()

    assert attention.wrong_kernel(wanted, "cuda", kernels_seen(both, "cuda").names, eager=True) is None


@pytest.mark.gpu
def test_capability_is_known_to_compiled_code() -> None:
    layer = DotProductAttention(4, 64)
    q = torch.randn(128, 2, 4, 64, device="cuda", dtype=torch.bfloat16)
    compiled = torch.compile(layer, fullgraph=True)
    torch.testing.assert_close(compiled(q, q, q), layer(q, q, q), atol=2e-2, rtol=2e-2)
