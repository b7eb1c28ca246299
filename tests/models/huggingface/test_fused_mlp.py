"""MLPs of any class by the kernels: found by their names, tried, and computed module by module where somebody looks."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from families import draw
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import te_bench.models as te
from te_bench.models import fp8, recipe


class NanoGPT(nn.Module):
    """As nanoGPT's, dropout at the end."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.c_fc, self.gelu, self.c_proj = nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.dropout(self.c_proj(self.gelu(self.c_fc(x))))
        return out


class FeedForward(nn.Module):
    """As torchtitan's, without a module for its activation."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = (nn.Linear(*sizes, bias=False) for sizes in ((32, 64), (64, 32), (32, 64)))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out


class Scaled(FeedForward):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Swapped(FeedForward):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(F.silu(self.w3(x)) * self.w1(x))
        return out


class Erf(FeedForward):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(F.gelu(self.w1(x)) * self.w3(x))
        return out


class Clipping(FeedForward):
    """As DeepseekV4MLP's and Glm5NextTextMLP's."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(F.silu(self.w1(x).clamp(max=10)) * self.w3(x).clamp(-10, 10))
        return out


class Keyed(FeedForward):
    """As Zamba2's, whose layer says which adapter to add."""

    def forward(self, x: Tensor, layer: int | None = None) -> Tensor:
        adapters = {0: self.w1}
        return self.w2(F.silu(adapters[layer](x)) * self.w3(x))  # type: ignore[index]


class Ungated(nn.Module):
    """As ViT's, whose activation is a module."""

    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(32, 64), act, nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(self.act(self.fc1(x)))
        return out


class DropsInTraining(Ungated):
    """Dropout without a module of its own."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(F.dropout(self.act(self.fc1(x)), 0.5, self.training))
        return out


class Counting(nn.BatchNorm1d):
    """An activation that keeps count in training, in buffers."""

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(super().forward(x.flatten(0, -2)).view_as(x))


def train(model: nn.Module, x: Tensor) -> tuple[Tensor, list[Tensor | None]]:
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = model(x)
    (y * draw(*y.shape, seed=5).to(y)).sum().backward()
    return y.detach(), [x.grad, *(p.grad for p in model.parameters())]


def is_fused(model: nn.Module, x: Tensor) -> bool:
    """Whether the model's output is of the fused MLP, by the names in its graph."""
    y = model(x)  # held: torch 2.11 forgets the graph of a Function whose output is gone
    found, todo = set(), [y.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in found:
            found.add(node)
            todo += [above for above, _ in node.next_functions]
    return any(node.name() in ("_HalfBackward", "_Fp8Backward") for node in found)


@pytest.mark.parametrize(("cls", "kind"), [(NanoGPT, "gelu_erf"), (FeedForward, "swiglu")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_class_of_the_users_own_is_found_out(cls: Any, kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(cls()).to(dtype)
    model, x = copy.deepcopy(plain), draw(3, 5, 32).to(dtype)
    report = te.convert(model, parts="mlp")
    assert [(entry.name, entry.after) for entry in report.parts] == [("0", f"products and {kind}")]
    assert is_fused(model, x)
    (y, found), (expected, gradients) = train(model, x), train(plain, x)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 0.03, "atol": 0.03}
    torch.testing.assert_close(y, expected, **tolerance)
    for g, truth in zip(found, gradients, strict=True):
        assert g is not None
        assert truth is not None
        assert (g - truth).norm() < (1e-5 if dtype is torch.float32 else 0.01) * truth.norm()


@pytest.mark.parametrize("cls", [Scaled, Swapped, Erf, Keyed])
def test_what_computes_another_function_stays(cls: Any) -> None:
    model = nn.Sequential(cls())
    report = te.convert(model, parts="mlp")
    assert report.parts[0].after is None
    assert "another function, or by an activation that no kernel has" in (report.parts[0].reason or "")
    assert type(model[0]) is cls


def assert_stays(mlp: nn.Module) -> None:
    model = nn.Sequential(mlp)
    own = type(mlp)
    assert "another function" in (te.convert(model, parts="mlp").parts[0].reason or "")
    assert type(model[0]) is own


def test_an_activation_that_clips_stays() -> None:
    assert_stays(Clipping())
    assert_stays(Ungated(nn.ReLU6()))


def test_an_activation_of_transformers_that_clips_stays() -> None:
    activations = pytest.importorskip("transformers.activations")
    assert_stays(Ungated(activations.ACT2FN["gelu_10"]))
    assert_stays(Ungated(activations.ACT2FN["relu6"]))


@pytest.mark.parametrize("training", [True, False])
def test_a_dropout_that_only_training_shows_is_found_in_evaluation_too(training: bool) -> None:
    assert_stays(DropsInTraining(nn.GELU()).train(training))
    assert_stays(Ungated(nn.Sequential(nn.GELU(), nn.Dropout(0.5))).train(training))
    model = nn.Sequential(Ungated(nn.GELU())).train(training)
    assert te.convert(model, parts="mlp").parts[0].after == "products and gelu_erf"
    assert all(module.training is training for module in model.modules())


def test_finding_out_changes_no_buffer_and_draws_no_number() -> None:
    act, dropping = Counting(64), DropsInTraining(nn.GELU())
    counting, state = Ungated(act), torch.get_rng_state()
    assert_stays(counting)
    assert_stays(dropping)
    assert torch.equal(torch.get_rng_state(), state)
    assert act.num_batches_tracked == 0
    assert act.running_mean is not None
    assert not act.running_mean.any()


def test_in_autocast_it_computes_in_its_dtype() -> None:
    plain = nn.Sequential(FeedForward())
    model, x = copy.deepcopy(plain), draw(5, 32)
    te.convert(model, parts="mlp")
    with torch.autocast("cpu", torch.bfloat16):
        y, expected = model(x), plain(x)
        assert is_fused(model, x)
    assert y.dtype is torch.bfloat16
    torch.testing.assert_close(y, expected, rtol=0.03, atol=0.03)
    y.sum().backward()
    assert model[0].w1.weight.grad.dtype is torch.float32


@pytest.mark.parametrize("choice", [recipe.DelayedScaling(amax_history_len=2), recipe.Float8BlockScaling()])
@pytest.mark.parametrize("cls", [NanoGPT, FeedForward])
def test_in_fp8_it_is_as_near_as_layer_by_layer(cls: Any, choice: Any) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(cls())
    x, far = draw(16, 32), []
    y, gradients = train(plain, x)
    for parts in (("linear",), ("linear", "mlp")):
        model = copy.deepcopy(plain)
        te.convert(model, choice, parts=parts)
        assert is_fused(model, x) is ("mlp" in parts)
        train(model, x)
        near, found = train(model, x)
        pairs = [(near, y), *zip(found, gradients, strict=True)]
        far.append([((a - b).norm() / b.norm()).item() for a, b in pairs if a is not None and b is not None])
    assert far[1][0] > 0
    assert all(fused < 1.5 * single + 0.01 for single, fused in zip(*far, strict=True))


@pytest.mark.parametrize("choice", [None, recipe.Float8CurrentScaling()])
def test_frozen_weights_get_no_gradient_and_the_others_theirs(choice: Any) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(FeedForward()), draw(16, 32)
    te.convert(model, choice, parts=("linear", "mlp"))
    whole = train(model, x)[1]
    model[0].w1.weight.requires_grad_(False)
    model[0].w2.weight.requires_grad_(False)
    assert is_fused(model, x)
    part = train(model, x)[1]
    assert part[1] is part[2] is None
    for i in (0, 3):
        torch.testing.assert_close(part[i], whole[i])


def test_where_somebody_looks_it_goes_layer_by_layer() -> None:
    model, x, seen = nn.Sequential(FeedForward()), draw(5, 32), []
    expected = model(x)
    te.convert(model, parts="mlp")
    handle = model[0].w3.register_forward_hook(lambda module, args, out: seen.append(out.shape))
    torch.testing.assert_close(model(x), expected)
    assert seen == [(5, 64)]
    assert not is_fused(model, x)
    handle.remove()
    assert is_fused(model, x)
    with fp8.autocast(calibrating=True, enabled=False, recipe=recipe.DelayedScaling()):
        assert not is_fused(model, x)


@pytest.mark.parametrize("nested", [False, True])
def test_an_activation_with_a_hook_or_another_one_goes_layer_by_layer(nested: bool) -> None:
    act: nn.Module = nn.Sequential(nn.GELU()) if nested else nn.GELU()
    model, x, seen = nn.Sequential(Ungated(act)), draw(5, 32), []
    te.convert(model, parts="mlp")
    model = copy.deepcopy(model)
    assert is_fused(model, x)
    mlp: Any = model[0]
    listened = mlp.act[0] if nested else mlp.act
    handle = listened.register_forward_hook(lambda module, args, out: seen.append(out.shape))
    assert not is_fused(model, x)
    assert seen == [(5, 64)]
    handle.remove()
    assert is_fused(model, x)
    if nested:
        mlp.act[0] = nn.ReLU()
    else:
        mlp.act = nn.ReLU()
    torch.testing.assert_close(model(x), mlp.fc2(mlp.fc1(x).relu()))


@pytest.mark.parametrize("choice", [None, recipe.Float8CurrentScaling()])
def test_a_second_derivative_is_refused_and_a_first_with_its_graph_is_not(choice: Any) -> None:
    model, x = nn.Sequential(FeedForward()), draw(16, 32)
    te.convert(model, choice, parts=("linear", "mlp"))
    assert is_fused(model, x)
    weight = model[0].w1.weight
    (alone,) = torch.autograd.grad(model(x).sum(), weight)
    (gradient,) = torch.autograd.grad(model(x).sum(), weight, create_graph=True)
    torch.testing.assert_close(gradient.detach(), alone)
    with pytest.raises(ValueError, match="create_graph=True asks for second derivatives"):
        gradient.square().sum().backward()


@pytest.mark.parametrize("reentrant", [True, False])
def test_under_gradient_checkpointing_it_computes_the_same(reentrant: bool) -> None:
    model, x = nn.Sequential(FeedForward()), draw(5, 32).requires_grad_()
    te.convert(model, parts="mlp")
    expected = torch.autograd.grad(model(x).square().sum(), model[0].w1.weight)[0]
    checkpoint(model, x, use_reentrant=reentrant).square().sum().backward()
    torch.testing.assert_close(model[0].w1.weight.grad, expected)


def test_dropout_at_the_end_drops_after_the_kernels() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(NanoGPT(dropout=0.5)), draw(64, 32)
    te.convert(model, parts="mlp")
    assert is_fused(model, x)
    assert 0.3 < (model(x) == 0).float().mean() < 0.7
    model.eval()
    assert not (model(x) == 0).any()


def test_layers_are_no_conv1d() -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.GPT2Model(transformers.GPT2Config(n_layer=1, n_head=2, n_embd=32, vocab_size=64))
    report = te.convert(model, parts="mlp")
    assert report.parts[0].reason == "its c_fc is a Conv1D, and no Linear"


@pytest.mark.gpu
@pytest.mark.parametrize("cls", [NanoGPT, FeedForward])
def test_on_a_gpu_in_bf16_it_is_as_near_to_float32_as_the_module(cls: Any) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(cls()).cuda()
    x = draw(64, 32).cuda()
    truth = train(plain, x)[1]
    errors = []
    for parts in ("norm", "mlp"):
        model = copy.deepcopy(plain).bfloat16()
        te.convert(model, parts=parts)
        assert is_fused(model, x.bfloat16()) is (parts == "mlp")
        pairs = zip(train(model, x.bfloat16())[1], truth, strict=True)
        errors.append([((g.float() - t).norm() / t.norm()).item() for g, t in pairs if g is not None and t is not None])
    assert all(fused < 2 * own + 1e-3 for own, fused in zip(*errors, strict=True))
