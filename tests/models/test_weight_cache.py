"""cache_weights: a weight is cast once a step of the optimizer, whoever calls the model, and again when it has changed."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conversion_cases import Tiny, an_input
from torch import Tensor, nn

import te_bench.models as te
from te_bench.kernels.quantize import Quantized
from te_bench.models import fp8, recipe

DELAYED = recipe.DelayedScaling(amax_history_len=4)
MODULES: dict[str, Callable[[], nn.Module]] = {
    "Linear": lambda: te.Linear(32, 32),
    "LayerNormLinear": lambda: te.LayerNormLinear(32, 32),
    "LayerNormMLP": lambda: te.LayerNormMLP(32, 64),
    "TransformerLayer": lambda: te.TransformerLayer(32, 64, 2, hidden_dropout=0.0, attention_dropout=0.0),
}


@pytest.fixture
def casts(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Every weight that a recipe casts."""
    seen: list[Tensor] = []
    for kind in (recipe.DelayedScaling, recipe.Float8CurrentScaling):

        def quantize(self: Any, x: Tensor, role: str, *args: Any, own: Any = kind.quantize, **kwargs: Any) -> Quantized:
            if role == "weight":
                seen.append(x)
            made: Quantized = own(self, x, role, *args, **kwargs)
            return made

        monkeypatch.setattr(kind, "quantize", quantize)
    return seen


def a_model(choice: recipe.Recipe = DELAYED) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Tiny()
    te.convert(model, choice)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    te.cache_weights(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batches: int = 3) -> Tensor:
    """The last batch's output."""
    for number in range(batches):
        y: Tensor = model(an_input() + number)
        y.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return y.detach()


def test_a_step_casts_each_weight_once(casts: list[Tensor]) -> None:
    model, optimizer = a_model()
    for _ in range(3):
        step(model, optimizer)
    assert len(casts) == 3 * 2
    with torch.no_grad():
        model(an_input())
    assert len(casts) == 4 * 2  # an evaluation's casts gather no amax, so they are not kept
    step(model, optimizer)
    assert len(casts) == 5 * 2


@pytest.mark.parametrize("module", MODULES)
def test_without_a_scale_to_remember_no_bit_changes(module: str, casts: list[Tensor]) -> None:
    torch.manual_seed(0)
    cached = nn.Sequential(MODULES[module]())
    plain, x, found = copy.deepcopy(cached), torch.randn(16, 2, 32), []
    for model in (plain, cached):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if model is cached:
            te.cache_weights(model, optimizer)
        casts.clear()
        for _ in range(2):
            for _ in range(2):
                with te.autocast(recipe=recipe.Float8CurrentScaling()):
                    y = model(x)
                y.square().mean().backward()
            optimizer.step()
        found.append((len(casts), y, [p.grad for p in model.parameters()]))
    assert found[0][0] == 2 * found[1][0] > 0
    torch.testing.assert_close(found[0][1:], found[1][1:], rtol=0, atol=0)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_delayed_scaling_keeps_the_cast_of_the_first_pass(device: str) -> None:
    """As is_first_microbatch does."""
    torch.manual_seed(0)
    own, said = nn.Sequential(te.Linear(32, 32, device=device)), te.Linear(32, 32, device=device)
    said.load_state_dict(own[0].state_dict())
    optimizers = [torch.optim.SGD(layer.parameters(), lr=1.0) for layer in (own, said)]
    te.cache_weights(own, optimizers[0])
    for _ in range(3):
        for number in range(3):
            x = an_input().to(device) * (1 + number)
            with te.autocast(recipe=DELAYED):
                y, expected = own(x), said(x, is_first_microbatch=number == 0)
            assert torch.equal(y, expected)
            (y.square().mean() + expected.square().mean()).backward()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(own[0].state_dict(), said.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("change", ["in place", "another", "loaded", "moved", "recipe"])
def test_a_weight_that_others_change_is_cast_again(change: str, casts: list[Tensor]) -> None:
    model: Any
    model, _ = a_model(recipe.Float8CurrentScaling())
    model(an_input())
    with torch.no_grad():
        if change == "in place":
            model.up.weight.mul_(2)
        elif change == "another":
            model.up.weight = nn.Parameter(2 * model.up.weight)
        elif change == "loaded":
            model.load_state_dict({name: 2 * value for name, value in model.state_dict().items()})
        elif change == "moved":
            model.double().float()
        else:
            te.convert(model, DELAYED)
    expected = copy.deepcopy(model)(an_input())
    casts.clear()
    assert torch.equal(model(an_input()), expected)
    assert casts


def test_an_optimizer_may_write_past_autograd_s_versions(casts: list[Tensor]) -> None:
    """As bitsandbytes' do, by pointers: the end of its step is what counts."""

    class Doubling(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for p in self.param_groups[0]["params"]:
                p.data.mul_(2)

    model, _ = a_model()
    te.cache_weights(model, optimizer := Doubling(model.parameters()))
    for _ in range(2):
        step(model, optimizer)
    assert len(casts) == 4


def test_a_copy_is_cast_in_each_pass_until_its_own_optimizer_is_named(casts: list[Tensor]) -> None:
    model, _ = a_model()
    twin = copy.deepcopy(model)
    for _ in range(2):
        twin(an_input())
    assert len(casts) == 4
    te.cache_weights(twin, torch.optim.SGD(twin.parameters()))
    for _ in range(2):
        twin(an_input())
    assert len(casts) == 6


@pytest.mark.parametrize("kind", [DELAYED, recipe.Float8CurrentScaling()], ids=lambda r: type(r).__name__)
def test_checkpointing_changes_no_bit(kind: recipe.Recipe) -> None:
    outputs = []
    for wrap in (False, True):
        model, optimizer = a_model(kind)
        inner = model.forward
        if wrap:
            model.forward = lambda x, inner=inner: te.checkpoint(inner, x)  # type: ignore[method-assign]
        outputs.append([step(model, optimizer) for _ in range(3)])
    assert all(torch.equal(x, y) for x, y in zip(*outputs, strict=True))


def test_what_torch_compile_traces_casts_as_ever() -> None:
    outputs = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model: Any = nn.Sequential(te.Linear(32, 32))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if compiled:
            te.cache_weights(model, optimizer)
        run = torch.compile(model, backend="eager") if compiled else model
        found = []
        for _ in range(4):
            with te.autocast(recipe=DELAYED):
                y = run(an_input())
            y.square().mean().backward()
            found.append(y.detach())
        outputs.append(found)
    assert all(torch.equal(x, y) for x, y in zip(*outputs, strict=True))


@pytest.mark.gpu
def test_what_a_cuda_graph_captures_casts_as_ever() -> None:
    model = nn.Sequential(te.Linear(64, 64, params_dtype=torch.bfloat16))
    te.cache_weights(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.randn(64, 64, device="cuda", dtype=torch.bfloat16)

    def run() -> Tensor:
        with te.autocast(recipe=recipe.Float8CurrentScaling()):
            y: Tensor = model(x)
        return y

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            before = run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run()
    with torch.no_grad():
        model[0].weight.mul_(2)
    graph.replay()
    assert torch.equal(y, run())
    assert not torch.equal(y, before)


def test_frozen_weights_need_no_optimizer(casts: list[Tensor]) -> None:
    model: Any
    model, _ = a_model()
    model.up.requires_grad_(False)
    model.down.requires_grad_(False)
    optimizer = torch.optim.SGD(model.norm.parameters(), lr=0.1)
    te.cache_weights(model, optimizer)
    step(model, optimizer)
    assert len(casts) == 2


def test_what_it_cannot_keep_is_one_sentence() -> None:
    plain, model = Tiny(), Tiny()
    before = torch.optim.SGD(plain.parameters())
    te.convert(model, DELAYED)
    with pytest.raises(ValueError, match=r"Tiny has no FP8 layers: call te.convert\(model, recipe\) first"):
        te.cache_weights(plain, before)
    with pytest.raises(ValueError, match=r"no optimizer given has up.weight.*make the optimizer after te.convert"):
        te.cache_weights(model, before)
    with pytest.raises(ValueError, match="takes the optimizers that train the model, got Tiny"):
        te.cache_weights(model, model)


def test_data_parallel_is_refused_in_one_sentence() -> None:
    """torch.nn.parallel.replicate, for which there are no two GPUs here, asks each module so for its copy."""
    model, layer = Tiny(), te.Linear(32, 32)
    te.convert(model, DELAYED)
    with pytest.raises(ValueError, match="start one process a GPU, torchrun --nproc-per-node N"):
        model._replicate_for_data_parallel()
    assert isinstance(layer._replicate_for_data_parallel(), te.Linear)  # without FP8 it is as any module
    with te.autocast(recipe=DELAYED), pytest.raises(ValueError, match="threads of one process"):
        layer._replicate_for_data_parallel()
    assert not fp8.is_fp8_enabled()


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = (nn.Linear(32, 32, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))
        return out


def test_a_joined_weight_is_kept_until_either_part_changes_and_apart_from_a_part_alone(casts: list[Tensor]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Gated()).bfloat16()
    plain = copy.deepcopy(model)
    te.convert(model, recipe.Float8CurrentScaling(), parts="all")
    te.convert(plain, recipe.Float8CurrentScaling(), parts="all")
    te.cache_weights(model, torch.optim.SGD(model.parameters()))
    x = an_input().bfloat16()

    def same() -> bool:
        return torch.equal(model(x), plain(x))

    assert same()
    assert len(casts) == 2 + 2  # both first weights as one
    assert same()
    assert len(casts) == 4 + 2  # plain's
    with torch.no_grad():
        for each in (model, plain):
            each[0].w3.weight.mul_(2)  # by no optimizer
    assert same()
    handles = [each[0].w2.register_forward_hook(lambda *_: None) for each in (model, plain)]
    assert same()  # module by module: w1 alone, not joined
    for handle in handles:
        handle.remove()
    assert same()
