"""torch.compile(fullgraph=True) with the autocast outside: the same as eager, and compiled once."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from module_cases import FAMILIES, randomise, transformer
from torch import Tensor, nn

import te_bench.models as te
from te_bench.models import recipe

MODULES: dict[str, Callable[..., nn.Module]] = {
    "Linear": lambda **o: te.Linear(48, 32, **o),
    "LayerNormLinear": lambda **o: te.LayerNormLinear(48, 32, return_layernorm_output=False, **o),
    "LayerNormMLP": lambda **o: te.LayerNormMLP(48, 64, activation="swiglu", **o),
    "TransformerLayer": transformer,
}
#: A recipe of its own for every step: equal ones must count as one.
RECIPES: dict[str, Callable[[], recipe.Recipe]] = {
    "delayed": lambda: recipe.DelayedScaling(amax_history_len=3),
    "current": lambda: recipe.Float8CurrentScaling(),
    "row": lambda: recipe.RowwiseScaling(),
    "block": lambda: recipe.Float8BlockScaling(),
}


pytestmark = pytest.mark.usefixtures("compiled_once")


def train(
    module: nn.Module, forward: Callable[..., Any], name: str, steps: int = 4, **options: Any
) -> list[dict[str, Tensor]]:
    """Results of some steps on changing data: output, gradients, state."""
    found = []
    device = next(module.parameters()).device
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        x = (torch.randn(16, 2, 48, generator=generator) * 3.0**step).to(device).requires_grad_()
        module.zero_grad()
        with te.autocast(recipe=RECIPES[name]()):
            y = forward(x, **options)
        weights = torch.linspace(-1, 1, y.shape[-1], device=device)
        (y.float() * weights).mean().backward()
        assert x.grad is not None
        grads = {key: p.grad.clone() for key, p in module.named_parameters() if p.grad is not None}
        state = {key: value.clone() for key, value in module.state_dict().items()}
        found.append({"y": y.detach(), "dx": x.grad, **{f"d{key}": grad for key, grad in grads.items()}, **state})
    return found


def compare(eager: list[dict[str, Tensor]], compiled: list[dict[str, Tensor]], tolerance: float) -> None:
    for step, (a, b) in enumerate(zip(eager, compiled, strict=True)):
        assert a.keys() == b.keys()
        for key in a:
            if "key_bias" in key and key.startswith("d"):
                continue  # a gradient that is 0: only noise
            size = a[key].double().norm()
            assert (a[key].double() - b[key].double()).norm() <= tolerance * size, (step, key)


def pair(module: str, **options: Any) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    eager = randomise(MODULES[module](**options))
    return eager, copy.deepcopy(eager)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("LayerNormLinear", "current"),
        pytest.param("LayerNormMLP", "row", marks=pytest.mark.slow),
        ("TransformerLayer", "delayed"),
        pytest.param("TransformerLayer", "block", marks=pytest.mark.slow),
    ],
)
def test_bit_for_bit_what_eager_computes(module: str, name: str) -> None:
    """Of Linear test_micro_batches holds it, of both modules with a norm under delayed scaling the region of several."""
    eager, compiled = pair(module)
    expected = train(eager, eager, name)
    assert name != "delayed" or any("fp8_scale_bwd" in key for key in expected[0])
    ours = train(compiled, torch.compile(compiled, fullgraph=True, backend="aot_eager"), name)
    compare(expected, ours, 0.0)


def test_inductor() -> None:
    """To rounding: a value that falls to the other side of an FP8 midpoint moves by 6 %, one of many.

    Casts and GEMMs are operators that Inductor calls whatever the recipe; what a layer is made of is one graph by
    test_bit_for_bit_what_eager_computes, and Inductor's of all modules is the GPU's.
    """
    eager, compiled = pair("LayerNormLinear")
    compare(train(eager, eager, "delayed"), train(compiled, torch.compile(compiled, fullgraph=True), "delayed"), 2e-2)


@pytest.mark.parametrize("name", ["delayed", "current"])
def test_micro_batches(name: str) -> None:
    results = []
    for module in pair("Linear"):
        forward = module
        if results:
            torch._dynamo.config.error_on_recompile = False  # once for each flag
            forward = torch.compile(module, fullgraph=True, backend="aot_eager")
        found = []
        for flag in (True, False, True, False):
            found += train(module, forward, name, 1, is_first_microbatch=flag)
        results.append(found)
    compare(*results, 0.0)


def test_several_modules_and_a_second_forward_in_one_region() -> None:
    torch.manual_seed(0)
    eager = nn.Sequential(te.LayerNormLinear(48, 48), te.LayerNormMLP(48, 64))
    compiled = copy.deepcopy(eager)
    compare(
        train(eager, lambda x: eager(eager(x)), "delayed"),
        train(compiled, torch.compile(lambda x: compiled(compiled(x)), fullgraph=True, backend="aot_eager"), "delayed"),
        0.0,
    )


def test_two_calls_before_their_backward_passes_are_loud() -> None:
    """torch.compile keeps the backward history for the backward pass and sees that the other call's wrote to it.

    Eager mode and one graph with both calls can do it; never a silently wrong amax.
    """
    for module in pair("Linear"):
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        for forward in (module, compiled):
            with te.autocast(recipe=RECIPES["delayed"]()):
                first, second = forward(torch.ones(8, 48)), forward(torch.ones(8, 48))
            second.sum().backward()
            if forward is module:
                first.sum().backward()
            else:
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    first.sum().backward()


@pytest.mark.parametrize("loaded", [False, True])
def test_layers_compiled_one_by_one_are_compiled_once(loaded: bool) -> None:
    """As is usual for deep models: the state that the first layer's call makes, the others' calls find."""
    torch.manual_seed(0)
    eager, another = (nn.Sequential(*(te.Linear(48, 48) for _ in range(3))) for _ in range(2))
    if loaded:
        train(eager, eager, "delayed", 1)
    another.load_state_dict(eager.state_dict())
    for layer in another:
        layer.compile(fullgraph=True, backend="aot_eager")
    compare(train(eager, eager, "delayed"), train(another, another, "delayed"), 0.0)


def test_a_layer_that_cannot_load_its_scales_leaves_those_like_it_alone() -> None:
    wrong, layer = te.Linear(48, 48), te.Linear(48, 48)
    with te.autocast(recipe=recipe.DelayedScaling(amax_history_len=5)):
        wrong(torch.ones(8, 48))
    wrong = copy.deepcopy(wrong)
    found = train(layer, torch.compile(layer, fullgraph=True, backend="aot_eager"), "delayed")
    assert found[-1]["fp8_amax_history_fwd"].shape[0] == 3
    with pytest.raises(ValueError, match="amax_history_len=5"):
        train(wrong, wrong, "delayed", 1)


def test_without_fp8_and_with_it_are_two_graphs() -> None:
    eager, compiled = pair("LayerNormMLP")
    forward = torch.compile(compiled, fullgraph=True, backend="aot_eager")
    x = torch.randn(8, 48)
    assert torch.equal(forward(x), eager(x))
    torch._dynamo.config.error_on_recompile = False
    with te.autocast(recipe=recipe.Float8CurrentScaling()):
        assert torch.equal(forward(x), eager(x))
    assert torch.equal(forward(x), eager(x))


def test_evaluation_leaves_no_trace() -> None:
    _, compiled = pair("Linear")
    torch._dynamo.config.error_on_recompile = False
    forward = torch.compile(compiled, fullgraph=True, backend="aot_eager")
    train(compiled, forward, "delayed", 2)
    before = {key: value.clone() for key, value in compiled.state_dict().items()}
    with torch.no_grad(), te.autocast(recipe=RECIPES["delayed"]()):
        forward(torch.full((4, 48), 1e3))
    assert all(torch.equal(value, before[key]) for key, value in compiled.state_dict().items())


@pytest.mark.gpu
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("module", MODULES)
def test_inductor_on_a_gpu(module: str, name: str) -> None:
    eager, compiled = pair(module, device="cuda")
    compare(train(eager, eager, name), train(compiled, torch.compile(compiled, fullgraph=True), name), 3e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("module", ["LayerNormMLP", "TransformerLayer"])
def test_cuda_graph_of_a_training_step(module: str) -> None:
    """Three passes, a capture of forward, update of the scales and backward, and five replays on new data."""
    eager, captured = pair(module, device="cuda")
    asked = recipe.DelayedScaling(amax_history_len=3)
    static_x = torch.zeros(16, 2, 48, device="cuda", requires_grad=True)

    def step(layer: nn.Module, x: Tensor) -> Tensor:
        with te.autocast(recipe=asked):
            y = layer(x)
        (y * torch.linspace(-1, 1, 48, device="cuda")).mean().backward()
        return y

    batches = [torch.randn(16, 2, 48, device="cuda") * 2.0**i for i in range(8)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for x in batches[:3]:
            with torch.no_grad():
                static_x.copy_(x)
            static_x.grad = None
            captured.zero_grad(set_to_none=True)
            step(captured, static_x)
    torch.cuda.current_stream().wait_stream(stream)
    before = {key: value.clone() for key, value in captured.state_dict().items()}
    static_x.grad = None
    captured.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(captured, static_x)
    assert all(torch.equal(value, before[key]) for key, value in captured.state_dict().items())  # nothing has run yet
    for x in batches[:3]:
        eager.zero_grad()
        step(eager, x.clone().requires_grad_())
    for i, x in enumerate(batches[3:]):
        with torch.no_grad():
            static_x.copy_(x)
        eager.zero_grad()
        leaf = x.clone().requires_grad_()
        y = step(eager, leaf)  # first: the end of its autocast takes in what the other's backward pass left waiting
        graph.replay()
        assert leaf.grad is not None
        assert static_x.grad is not None
        assert torch.allclose(out, y, rtol=1e-5, atol=1e-5), i
        assert (static_x.grad - leaf.grad).norm().item() <= 1e-4 * leaf.grad.norm().item(), i
        state = eager.state_dict()
        for key, value in captured.state_dict().items():
            assert torch.allclose(value, state[key], rtol=1e-5), (i, key)
