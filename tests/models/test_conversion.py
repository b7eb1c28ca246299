"""convert: other people's models compute the same function, in FP8 when asked, and the report says what it did."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from conversion_cases import RECIPES, Scaled, Tiny, an_input, error
from torch import nn
from torch.nn.utils import parametrizations, prune

import te_bench.models as te
from te_bench.models import fp8, recipe
from te_bench.models.conversion import convert


def test_parameters_are_kept_so_optimizers_go_on() -> None:
    model = Tiny().bfloat16().eval()
    model.up.weight.requires_grad_(False)
    before = dict(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    state = torch.get_rng_state()
    convert(model, RECIPES[1])
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p is before[name] for name, p in model.named_parameters())
    assert list(before) == [name for name, _ in model.named_parameters()]
    assert not any(module.training for module in model.modules())
    old = model.down.weight.detach().clone()
    model(an_input().bfloat16()).float().square().sum().backward()
    optimizer.step()
    assert not torch.equal(model.down.weight, old)
    assert model.up.weight.grad is None


def test_the_report_is_a_table() -> None:
    model = nn.Sequential(*(Tiny() for _ in range(3)), nn.Linear(32, 10))
    report = convert(model)
    text = str(report)
    assert [line.split()[:4] for line in text.splitlines()[1:4]] == [
        ["*.norm", "3", "x", "LayerNorm"],
        ["*.up", "3", "x", "Linear"],
        ["*.down", "3", "x", "Linear"],
    ]
    assert "10 not divisible by 16 (pad=True converts it)" in text
    weights = 3 * 2 * 32 * 64
    total = weights + 3 * (64 + 64) + 32 * 10 + 10
    assert (report.gemm_parameters, report.parameters) == (weights, total)
    assert text.splitlines()[-1] == (
        "9 of 10 layers converted; no recipe, so FP8 only under your te.autocast: there "
        f"FP8 GEMMs read {weights:,} of {total:,} parameters ({weights / total:.1%}) "
        f"and do {weights / (weights + 320):.1%} of a token's FLOP with weights"
    )


def test_weights_outside_of_layers_are_counted_and_listed() -> None:
    encoder = nn.TransformerEncoderLayer(32, 4, 64)
    model = nn.Sequential(nn.Embedding(48, 32), encoder, nn.Conv1d(4, 4, 3))
    model.scale = nn.Parameter(torch.ones(32, 2))
    report = convert(model)
    found = {entry.name: (entry.kind, entry.parameters, entry.multiplied) for entry in report.outside}
    assert found == {
        "scale": ("Sequential", 64, None),
        "0.weight": ("Embedding", 48 * 32, 0),
        "1.self_attn.in_proj_weight": ("MultiheadAttention", 3 * 32 * 32, 3 * 32 * 32),
        "2.weight": ("Conv1d", 48, None),
    }
    fp8, stays = 2 * 32 * 64, 4 * 32 * 32
    assert report.flop_share == fp8 / (fp8 + stays)
    text = str(report)
    assert "kept: torch multiplies by it outside of any layer" in text
    assert text.endswith("50.0% of a token's FLOP with weights, not counting 112 parameters whose use is not known")
    assert convert(model).outside == report.outside


def test_a_filter_chooses() -> None:
    asked = []

    def wanted(name: str, module: nn.Module) -> bool:
        asked.append((name, type(module)))
        return name.endswith("up")

    model = nn.Sequential(Tiny())
    report = convert(model, filter=wanted)
    assert asked == [("0.norm", nn.LayerNorm), ("0.up", nn.Linear), ("0.down", nn.Linear)]
    assert [entry.name for entry in report.converted] == ["0.up"]
    assert {(kept.name, kept.reason) for kept in report.kept} == {
        ("0.norm", "filtered out"),
        ("0.down", "filtered out"),
    }


def test_padding_is_exact_enough_to_ask_for() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(33, 7))
    x = torch.randn(5, 33)
    expected = model(x)
    assert [kept.reason.split(" (")[0] for kept in convert(model).kept] == ["7 and 33 not divisible by 16"]
    convert(model, RECIPES[1], pad=True)
    assert isinstance(model[0], te.Linear)
    assert 1e-3 < error(model(x), expected) < 0.1


def test_a_layer_in_several_places_is_one_layer() -> None:
    layer = nn.Linear(32, 32)
    model = nn.Sequential(layer, nn.ReLU(), nn.Sequential(layer))
    report = convert(model)
    assert [entry.name for entry in report.converted] == ["0"]
    assert isinstance(model[0], te.Linear)
    assert model[0] is model[2][0]


def with_forward_replaced() -> nn.Module:
    layer = nn.Linear(32, 32)
    layer.forward = lambda x: x  # type: ignore[method-assign]
    return layer


def compiled() -> nn.Module:
    layer = nn.Linear(32, 32)
    layer.compile(backend="eager")
    return layer


def with_state_hook() -> nn.Module:
    layer = nn.Linear(32, 32)
    layer.register_state_dict_post_hook(lambda *args: None)
    return layer


def old_weight_norm() -> nn.Module:
    with pytest.warns(FutureWarning):
        return nn.utils.weight_norm(nn.Linear(32, 32))


STAYING: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "subclass": (lambda: Scaled(32, 32), "Scaled, a subclass of Linear"),
    "lazy": (lambda: nn.LazyLinear(32), "LazyLinear, a subclass of Linear"),
    "parametrised": (lambda: parametrizations.weight_norm(nn.Linear(32, 32)), "parametrised"),
    "weight_norm": (old_weight_norm, "weight_g, weight_v"),
    "pruned": (lambda: prune.l1_unstructured(nn.Linear(32, 32), "weight", 0.5), "weight_mask, weight_orig"),
    "replaced": (with_forward_replaced, "its forward was replaced"),
    "compiled": (compiled, "its forward was replaced, or compiled"),
    "state hook": (with_state_hook, "hooks on its state dict"),
    "float64": (lambda: nn.Linear(32, 32).double(), "torch.float64"),
    "odd": (lambda: nn.Linear(32, 24), "24 not divisible by 16"),
    "no weight": (lambda: nn.LayerNorm(32, elementwise_affine=False), "elementwise_affine=False"),
    "two dimensions": (lambda: nn.LayerNorm((4, 32)), "normalises over 2 dimensions"),
    "eps": (lambda: nn.RMSNorm(32), "eps=None"),
    "eps 0": (lambda: nn.LayerNorm(32, eps=0.0), "its eps is 0.0: te's must be a number greater than 0"),
    "nothing in": (lambda: nn.Linear(0, 32), "its weight is (32, 0): nothing to multiply"),
    "nothing": (lambda: nn.LayerNorm(0), "normalises over nothing"),
}


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("case", STAYING)
def test_what_stays_says_why(case: str) -> None:
    make, why = STAYING[case]
    layer = make()
    model = nn.Sequential(layer, nn.Linear(32, 32))
    report = convert(model)
    assert model[0] is layer
    assert isinstance(model[1], te.Linear)
    assert why in report.kept[0].reason
    assert [kept.name for kept in report.kept] == ["0"]


def test_the_projection_inside_pytorchs_attention_stays() -> None:
    model = nn.Sequential(nn.MultiheadAttention(32, 2))
    report = convert(model)
    assert [kept.name for kept in report.kept] == ["0.out_proj"]
    assert "NonDynamicallyQuantizableLinear" in report.kept[0].reason


def test_a_weight_in_two_linears_stays_in_both() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    model[1].weight = model[0].weight
    assert [kept.reason for kept in convert(model).kept] == [
        "its weight is also 1.weight",
        "its weight is also 0.weight",
    ]


def test_norms_without_bias_and_rms_norms() -> None:
    model = nn.Sequential(nn.LayerNorm(32, eps=1e-2, bias=False), nn.RMSNorm(32, eps=1e-2))
    nn.init.normal_(model[0].weight)
    nn.init.normal_(model[1].weight)
    x = an_input() * 0.1
    expected, keys = model(x), list(model.state_dict())
    convert(model)
    assert [type(layer) for layer in model] == [te.LayerNorm, te.RMSNorm]
    torch.testing.assert_close(model(x), expected)
    assert list(model.state_dict()) == keys


def test_hooks_go_with_the_layer_and_their_handles_still_remove_them() -> None:
    model = Tiny()
    seen: list[str] = []
    handles = [
        model.up.register_forward_pre_hook(lambda module, args: seen.append("before")),
        model.up.register_forward_hook(lambda module, args, out: seen.append(type(module).__module__)),
        model.up.register_full_backward_hook(lambda module, dx, dy: seen.append("backward")),
    ]
    model.up.note = "mine"
    convert(model, RECIPES[1])
    model(an_input().requires_grad_()).sum().backward()
    assert seen == ["before", "te_bench.models.modules.linear", "backward"]
    assert model.up.note == "mine"
    for handle in handles:
        handle.remove()
    model(an_input()).sum().backward()
    assert len(seen) == 3


def test_twice_is_once() -> None:
    model = Tiny()
    first = convert(model, RECIPES[0])
    layers, expected = list(model.modules()), model(an_input())
    report = convert(model, RECIPES[1])
    assert report.converted == report.kept == ()
    assert [(f.name, f.kind, f.parameters) for f in report.found] == [
        (c.name, c.after, c.parameters) for c in first.converted
    ]
    assert all(a is b for a, b in zip(model.modules(), layers, strict=True))
    assert not torch.equal(model(an_input()), expected)  # the recipe is the second one's
    assert type(model).__mro__.count(Tiny) == 1
    again = str(convert(model))  # the second call's recipe is still entered
    assert "; FP8 GEMMs read " in again


def test_in_two_goes_the_second_report_is_of_the_whole_model() -> None:
    model, at_once = (nn.Sequential(Tiny(), Tiny(), nn.Linear(32, 10)) for _ in range(2))
    whole = convert(at_once)
    first = convert(model, filter=lambda name, layer: name.endswith(("0.up", "1.norm")))
    assert (len(first.converted), len(first.kept), first.found) == (2, 5, ())
    report = convert(model)
    assert [c.name for c in report.converted] == ["0.norm", "0.down", "1.up", "1.down"]
    assert [f.name for f in report.found] == ["0.up", "1.norm"]
    assert [k.name for k in report.kept] == ["2"]
    assert (report.gemm_parameters, report.parameters) == (whole.gemm_parameters, whole.parameters)
    lines = str(report).splitlines()
    assert lines[-1].startswith("4 of 7 layers converted, 2 te's already; no recipe, ")
    assert "there FP8 GEMMs read 8,192 of " in lines[-1]
    assert ["*.up", "1", "x", "te.Linear", "te's", "already"] in [line.split() for line in lines]


def test_layers_that_were_tes_from_the_start_are_in_the_report() -> None:
    shared = te.Linear(32, 32)
    again = te.Linear(32, 32)
    again.weight = shared.weight
    mlp, split = te.LayerNormMLP(32, 64), te.Linear(32, 48, parameters_split=("query", "key", "value"))
    report = convert(nn.Sequential(shared, again, mlp, split, te.RMSNorm(32), nn.Linear(48, 16)))
    assert [(f.name, f.kind, f.parameters) for f in report.found] == [
        ("0", "Linear", 32 * 32),
        ("1", "Linear", 0),  # the same parameter
        ("2", "LayerNormMLP", 2 * 32 * 64),
        ("3", "Linear", 32 * 48),
        ("4", "RMSNorm", 0),
    ]
    assert report.gemm_parameters == 32 * 32 + 2 * 32 * 64 + 32 * 48 + 48 * 16
    assert convert(mlp).gemm_parameters == 2 * 32 * 64  # itself a te module


# ---- under a recipe of its own


@pytest.mark.parametrize("failure", [RuntimeError("no"), KeyboardInterrupt()], ids=repr)
def test_autocast_is_left_whatever_happens(failure: BaseException) -> None:
    model = Tiny()
    convert(model, RECIPES[0])
    for _ in range(2):
        with pytest.raises(type(failure)):
            model(an_input(), fail=failure)
        assert not fp8.is_fp8_enabled()
        model(an_input(), again=2).sum().backward()
        assert not fp8.is_fp8_enabled()
    assert fp8._depth == 0
    assert te.numerics(model)["up"]["input"]["scale"] != 1.0


def test_without_a_recipe_the_users_autocast_decides() -> None:
    model = nn.Sequential(nn.Linear(32, 32))
    expected = model(an_input())
    convert(model)
    assert torch.equal(model(an_input()), expected)
    with te.autocast(recipe=RECIPES[1]):
        near = model(an_input())
    assert 1e-3 < error(near, expected) < 0.1


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_copies_run_in_fp8_too(duplicate: Callable[[nn.Module], nn.Module]) -> None:
    model = Tiny()
    convert(model, RECIPES[0])
    for _ in range(2):
        model(an_input()).sum().backward()
    other = duplicate(model)
    assert torch.equal(other(an_input()), model(an_input()))
    assert isinstance(other, Tiny)
    other(an_input()).sum().backward()
    assert other.get_parameter("up.weight") is not model.up.weight


def test_a_slice_of_a_converted_model_computes_without_its_recipe() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
    expected = model[:2](an_input())
    convert(model, RECIPES[1])
    torch.testing.assert_close(model[:2](an_input()), expected)
    assert not torch.equal(model(an_input()), model[2](expected))


@pytest.mark.parametrize("eager", [True, False])
def test_pytorchs_encoder_layer_does_not_pass_fp8_by(eager: bool) -> None:
    """In inference its fast path reads the weights of its linear layers itself."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
    model = nn.TransformerEncoder(layer, 1).eval()
    x = an_input()[None]
    with torch.no_grad():
        expected = model(x)
        convert(model)
        torch.testing.assert_close(model(x), expected)
        with te.autocast(enabled=eager, recipe=RECIPES[1]):
            far = error(model(x), expected)
    assert (far > 1e-3) is eager
    assert far < 0.1


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_pytorchs_encoder_takes_a_padding_mask_in_inference() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), 2).eval()
    x, padding = torch.stack([an_input()] * 2), torch.zeros(2, 16, dtype=torch.bool)
    padding[1, 9:] = True
    with torch.no_grad():
        expected = model(x, src_key_padding_mask=padding)
        convert(model)
        torch.testing.assert_close(model(x, src_key_padding_mask=padding)[~padding], expected[~padding])


@pytest.mark.gpu
@pytest.mark.parametrize("choice", RECIPES, ids=lambda r: type(r).__name__)
def test_on_a_gpu_it_trains(choice: recipe.Recipe) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(128), nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128)).cuda().bfloat16()
    x = torch.randn(64, 128, device="cuda", dtype=torch.bfloat16)
    expected = model(x)
    report = convert(model, choice)
    assert len(report.converted) == 3 - choice.keeps_blocks
    model(x).float().square().sum().backward()
    coarsest = 0.3 if isinstance(choice, recipe.NVFP4BlockScaling) else 0.1  # E2M1's step is a quarter of a value
    assert 1e-3 < error(model(x).float(), expected.float()) < coarsest
    assert all(p.grad is not None and p.grad.isfinite().all().item() for p in model.parameters())
