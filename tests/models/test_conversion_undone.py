"""convert says what it cannot do, and whatever is raised on its way leaves the model as it was."""

from typing import Any

import pytest
import torch
from conversion_cases import Scaled, Tiny, an_input
from torch import nn

import te_bench.models as te
from te_bench.models import recipe
from te_bench.models.conversion import Conversion, convert


class Impossible(recipe.Float8CurrentScaling):
    def unsupported(self, device: str, capability: tuple[int, int] | None) -> str | None:
        return f"not on {device}"


@pytest.mark.parametrize(
    ("model", "choice", "why"),
    [
        (nn.Linear(32, 32), None, "wrap it"),
        (nn.RMSNorm(32), None, "wrap it"),
        (Scaled(32, 32), None, "a Scaled is one"),
        ("gpt2", None, "nn.Module, got str"),
        (Tiny(), "delayed", "'delayed' is no recipe"),
        (Tiny(), Impossible(), "not on cpu"),
    ],
    ids=["linear", "norm", "subclass", "a name", "no recipe", "device"],
)
def test_what_cannot_be_is_said_before_anything_changes(model: Any, choice: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        convert(model, choice)
    if isinstance(model, Tiny):
        assert type(model) is Tiny
        assert type(model.up) is nn.Linear


@pytest.mark.gpu
def test_a_gpu_without_fp8_is_named_before_anything_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Tiny().cuda()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    with pytest.raises(ValueError, match=r"this GPU has 8\.0"):
        convert(model, recipe.DelayedScaling())
    assert type(model.up) is nn.Linear
    assert isinstance(convert(model, recipe.DelayedScaling(emulate=True)), Conversion)


# ---- whatever is raised half-way, nothing has changed


class Refusing(dict[str, nn.Module]):
    """The children of a module that takes no te.Linear: what a swap half-way through a model can meet."""

    def __init__(self, children: dict[str, nn.Module], failure: BaseException) -> None:
        super().__init__(children)
        self.failure = failure

    def __setitem__(self, name: str, module: nn.Module) -> None:
        if isinstance(module, te.Linear):
            raise self.failure
        super().__setitem__(name, module)


def picture(model: nn.Module) -> list[Any]:
    """All that convert might change, by identity."""
    places = list(model.named_modules(remove_duplicate=False))
    attributes = [
        {name: value if isinstance(value, bool | int | str) else id(value) for name, value in vars(module).items()}
        for _, module in places
    ]
    children = [(name, id(module), type(module)) for name, module in places]
    return [children, attributes, [(name, id(p)) for name, p in model.named_parameters(remove_duplicate=False)]]


@pytest.mark.parametrize("failure", [RuntimeError("no"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("before", [None, recipe.RowwiseScaling()], ids=["new", "converted before"])
def test_a_swap_that_fails_half_way_leaves_the_model_as_it_was(before, failure):
    torch.manual_seed(0)
    shared = nn.Linear(32, 32)
    model = nn.Sequential(
        shared, nn.TransformerEncoderLayer(32, 2, 64), shared, nn.Sequential(nn.Linear(32, 32))
    ).eval()
    if before is not None:
        convert(model, before, filter=lambda name, layer: name == "0")
    vars(model[3])["_modules"] = Refusing(model[3]._modules, failure)
    was, x = picture(model), torch.randn(4, 32)
    expected = model(x)
    assert model[1].activation_relu_or_gelu == 1
    for _ in range(2):
        with pytest.raises(type(failure)):
            convert(model, recipe.Float8CurrentScaling())
        assert picture(model) == was
        assert torch.equal(model(x), expected)


class Final(Tiny):
    def __init_subclass__(cls, **options: Any) -> None:
        raise TypeError("Final is final")


class Registered(Tiny):
    def __init_subclass__(cls, *, key: str) -> None: ...


class Meta(type):
    def __new__(mcs, name: str, bases: tuple[type, ...], body: dict[str, Any]) -> Any:
        if any(isinstance(base, Meta) for base in bases):
            raise RuntimeError("sealed")
        return super().__new__(mcs, name, bases, body)


class Sealed(Tiny, metaclass=Meta):
    pass


@pytest.mark.parametrize(("cls", "why"), [(Final, "Final is final"), (Registered, "key"), (Sealed, "sealed")])
def test_a_class_without_subclasses_is_named_and_left_as_it_was(cls: type[Tiny], why: str) -> None:
    model = cls()
    was = picture(model)
    remedy = rf"{cls.__name__} can't enter the recipe by itself.*{why}.*convert without a recipe, and call"
    with pytest.raises(ValueError, match=remedy):
        convert(model, recipe.Float8CurrentScaling())
    assert picture(model) == was
    report = convert(model)  # the remedy
    assert len(report.converted) == 3
    with te.autocast(recipe=recipe.Float8CurrentScaling()):
        assert model(an_input()).isfinite().all()


def test_a_model_that_takes_no_attributes_is_converted_all_the_same() -> None:
    class Frozen(Tiny):
        def __setattr__(self, name: str, value: Any) -> None:
            if "down" in vars(self).get("_modules", {}):
                raise AttributeError("frozen")
            super().__setattr__(name, value)

    model = Frozen()
    convert(model, recipe.Float8CurrentScaling())
    assert isinstance(model.up, te.Linear)
    assert model(an_input()).isfinite().all()
