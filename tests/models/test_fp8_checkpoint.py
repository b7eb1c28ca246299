"""Activation checkpointing: te.checkpoint changes no bit, and torch's own fails loudly where it would."""

from collections.abc import Callable

import pytest
import torch
import torch.utils.checkpoint
from fp8_cases import RECIPES, model, train
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

import te_bench.models as te


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


FORMS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "whole": lambda m, x: te.checkpoint(m, x),
    "parts": lambda m, x: te.checkpoint(m[2], te.checkpoint(m[1], te.checkpoint(m[0], x))),
    "nested": lambda m, x: te.checkpoint(lambda h: m[2](te.checkpoint(lambda g: m[1](m[0](g)), h)), x),
    "twice nested": lambda m, x: te.checkpoint(
        lambda h: te.checkpoint(lambda g: m[2](te.checkpoint(m[1], m[0](g))), h), x
    ),
    "without early stop": lambda m, x: te.checkpoint(m, x, early_stop=False),
    "as Transformer Engine's users ask": lambda m, x: te.distributed.checkpoint(
        m, x, use_reentrant=True, distribute_saved_activations=False, get_rng_state_tracker=None, tp_group=None
    ),
}


@pytest.mark.parametrize(
    "options",
    [
        {"distribute_saved_activations": True},
        {"context_fn": lambda: None},
        {"debug": True},
    ],
)
def test_what_a_checkpoint_has_not_is_named(options: dict[str, object]) -> None:
    for function in (te.checkpoint, torch.compile(te.checkpoint, backend="eager")):
        with pytest.raises(ValueError, match=rf"^te.checkpoint.* {next(iter(options))}"):
            function(torch.sin, torch.ones(2), **options)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("form", "name"),
    [(form, name) for i, form in enumerate(FORMS) for j, name in enumerate(RECIPES) if i == 0 or j < 2],
)
def test_checkpointing_changes_no_bit(name: str, form: str, device: str) -> None:
    straight, checkpointed = model(device), model(device)
    expected = train(straight, straight, RECIPES[name])
    assert equal(expected, train(checkpointed, lambda x: FORMS[form](checkpointed, x), RECIPES[name]))


def test_a_checkpoint_can_be_recomputed_twice() -> None:
    layers, x = model(), torch.randn(8, 32, requires_grad=True)
    with te.autocast(recipe=RECIPES["delayed"]):
        y = te.checkpoint(layers, x).sum()
    (first,) = torch.autograd.grad(y, x, retain_graph=True)
    (second,) = torch.autograd.grad(y, x)
    assert torch.equal(first, second)


@pytest.mark.parametrize("name", ["delayed", "current"])
def test_what_is_computed_again_is_not_counted_again(name: str) -> None:
    x, found = torch.randn(8, 32), []
    for form in (None, "whole", "twice nested"):
        layers = model()
        with te.record_numerics(), te.autocast(recipe=RECIPES[name]):
            y = layers(x) if form is None else FORMS[form](layers, x)
        y.sum().backward()
        found.append(te.numerics(layers))
    assert found[0] == found[1] == found[2]
    tensors = [tensor for module in found[0].values() for tensor in module.values()]
    assert any(tensor["saturated"] + tensor["underflowed"] for tensor in tensors)


@pytest.mark.parametrize("name", ["delayed", "current", "row", "block"])
def test_autocast_inside_a_checkpoint(name: str) -> None:
    def inside(layers: nn.Module) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            with te.autocast(recipe=RECIPES[name]):
                return layers(x)

        return forward

    straight, checkpointed, plain = model(), model(), model()
    expected = train(straight, inside(straight), None)
    assert equal(expected, train(checkpointed, lambda x: te.checkpoint(inside(checkpointed), x), None))
    by_torch = train(plain, lambda x: torch.utils.checkpoint.checkpoint(inside(plain), x, use_reentrant=False), None, 1)
    if name != "delayed":  # which casts by the newer scales in torch's recomputation
        assert equal(expected[: len(by_torch)], by_torch)


def test_a_recomputed_autocast_takes_no_step_of_its_own() -> None:
    """It ends in the middle of the backward pass, when the layers after it have gathered theirs."""

    def inside(part: nn.Module) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            with te.autocast(recipe=RECIPES["delayed"]):
                return part(x)

        return forward

    found = []
    for kept in (True, False):
        layers = model()
        below, above = inside(layers[0]), inside(layers[1:])
        forward = below if kept else lambda x, f=below: te.checkpoint(f, x, early_stop=False)
        found.append(train(layers, lambda x, f=forward, g=above: g(f(x)), None))
    assert equal(*found)


@pytest.mark.parametrize("name", ["delayed", "current", "row", "block"])
@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("reentrant", [True, False])
def test_torchs_own_checkpoint_outside_of_autocast_fails_loudly(reentrant: bool, layer: int, name: str) -> None:
    """Its recomputation runs in the backward pass, without FP8: never silently another function's gradient."""
    layers = model()
    x = torch.randn(8, 32, requires_grad=True)
    with te.autocast(recipe=RECIPES[name]):
        y = torch.utils.checkpoint.checkpoint(layers[layer], x, use_reentrant=reentrant)
    with pytest.raises(ValueError, match=r"computed in FP8, and again in the backward pass without it.*te\.checkpoint"):
        y.sum().backward()


@pytest.mark.parametrize("reentrant", [True, False])
def test_it_fails_loudly_where_elements_are_counted(reentrant: bool) -> None:
    layers = model()
    with te.record_numerics(), te.autocast(recipe=RECIPES["current"]):
        y = torch.utils.checkpoint.checkpoint(layers, torch.randn(8, 32, requires_grad=True), use_reentrant=reentrant)
    with pytest.raises(ValueError, match="again in the backward pass without it"):
        y.sum().backward()


@pytest.mark.parametrize("reentrant", [True, False])
def test_torchs_own_checkpoint_without_fp8_goes_on_after_a_pass_with_it(reentrant: bool) -> None:
    layers = model()
    x = torch.randn(8, 32, requires_grad=True)
    with te.autocast(recipe=RECIPES["current"]):
        layers(x).sum().backward()
    found = []
    for forward in (layers, lambda x: torch.utils.checkpoint.checkpoint(layers, x, use_reentrant=reentrant)):
        layers.zero_grad()
        forward(x).square().sum().backward()
        found.append([p.grad.clone() for p in layers.parameters() if p.grad is not None])
    assert equal(*found)


@pytest.mark.parametrize("reentrant", [True, False])
def test_torchs_own_checkpoint_goes_through_calibration(reentrant: bool) -> None:
    layers, x = model(), torch.randn(8, 32, requires_grad=True)
    found = []
    for calibrating in (False, True):
        layers.zero_grad()
        with te.autocast(enabled=False, calibrating=calibrating, recipe=RECIPES["delayed"]):
            y = torch.utils.checkpoint.checkpoint(layers, x, use_reentrant=reentrant)
        y.square().sum().backward()
        found.append([p.grad.clone() for p in layers.parameters() if p.grad is not None])
    assert equal(*found)


# torch.compile


@pytest.mark.parametrize(
    ("form", "name", "backend"),
    [
        ("nested", "delayed", "aot_eager"),
        *(
            pytest.param(form, name, backend, marks=pytest.mark.slow)
            for form, name, backend in (
                ("parts", "current", "aot_eager"),
                ("whole", "none", "aot_eager"),
                ("whole", "delayed", "aot_eager_decomp_partition"),
            )
        ),
    ],
)
@pytest.mark.usefixtures("compiled_once")
def test_compiled_checkpoints_change_no_bit(form: str, name: str, backend: str) -> None:
    """Scales of rows and of blocks are to a checkpoint what "current" is.

    To rounding, where Inductor's own passes choose what is kept: the same graph without checkpoints is as far off.
    """
    straight, checkpointed = model(), model()
    expected = train(straight, straight, RECIPES[name])
    compiled = torch.compile(lambda x: FORMS[form](checkpointed, x), fullgraph=True, backend=backend)
    found = train(checkpointed, compiled, RECIPES[name])
    if backend == "aot_eager":
        assert equal(expected, found)
    else:
        assert all((a - b).norm() <= 2e-2 * a.norm() for a, b in zip(expected, found, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.usefixtures("compiled_once")
def test_compiled_checkpoints_on_a_gpu(name: str) -> None:
    straight, checkpointed = model("cuda"), model("cuda")
    expected = train(straight, straight, RECIPES[name])
    compiled = torch.compile(lambda x: te.checkpoint(checkpointed, x), fullgraph=True)
    found = train(checkpointed, compiled, RECIPES[name])
    assert all((a - b).norm() <= 3e-2 * a.norm() for a, b in zip(expected, found, strict=True))


def test_a_compiled_checkpoint_keeps_scales_and_nothing_else() -> None:
    kept: list[int] = []

    def look(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., object]:
        (outputs,) = next(node for node in graph.graph.nodes if node.op == "output").args
        made = [node.meta["val"] for node in outputs if node is not None and node.op != "placeholder"]
        kept.append(sum(value.numel() for value in made if value.dim() == 2 and 512 in value.shape))
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=look, partition_fn=min_cut_rematerialization_partition)
    for form in (lambda m, x: m(x), FORMS["whole"]):
        torch._dynamo.reset()
        layers = model()
        compiled = torch.compile(lambda x, f=form, m=layers: f(m, x), fullgraph=True, backend=backend)
        with te.autocast(recipe=RECIPES["delayed"]):
            compiled(torch.ones(512, 32, requires_grad=True))
    plain, checkpointed = kept
    assert plain > 4 * 512 * 32
    assert checkpointed == 512 * 32  # the result


def test_where_the_graph_breaks_inside_a_checkpoint_it_is_as_in_eager_mode() -> None:
    torch._dynamo.reset()

    def broken(layers: nn.Module, x: Tensor) -> Tensor:
        x = layers[0](x)
        torch._dynamo.graph_break()
        return layers[2](te.checkpoint(layers[1], x))

    straight, checkpointed = model(), model()
    expected = train(straight, straight, RECIPES["delayed"])
    compiled = torch.compile(lambda x: te.checkpoint(broken, checkpointed, x), backend="aot_eager")
    assert equal(expected, train(checkpointed, compiled, RECIPES["delayed"]))
    torch._dynamo.reset()


def test_a_layer_is_called_with_fp8_after_a_checkpoint_without_it() -> None:
    torch.manual_seed(0)
    layer, x = te.Linear(32, 32, device="cpu"), torch.randn(16, 32, requires_grad=True)

    def gradients(first: Callable[[Tensor], Tensor]) -> list[Tensor]:
        h = first(x)
        with te.autocast(recipe=RECIPES["current"]):
            y = layer(h)
        return list(torch.autograd.grad(y.square().sum(), [x, *layer.parameters()]))

    assert equal(gradients(layer), gradients(lambda h: te.checkpoint(layer, h)))
