"""A TransformerLayer by segments is the one of modules one by one, by the kernels meant for it; else its modules run."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from module_cases import RECIPES, randomise
from torch import Tensor, nn

import te_bench.models as te
from te_bench.kernels.activation import recomputed as _recomputed
from te_bench.kernels.activation.backends import triton as activation_triton
from te_bench.kernels.norm.backends import triton as norm_triton
from te_bench.kernels.quantize import TENSOR, Layout, Quantized
from te_bench.kernels.quantize import joined as _joined
from te_bench.kernels.quantize.backends import triton as quantize_triton
from te_bench.kernels.rotary.backends import reference as rotary_reference
from te_bench.models.fused import chain, segment
from te_bench.models.modules import layernorm, layernorm_mlp
from te_bench.models.recipe import DelayedScaling, Recipe, _recipe

HIDDEN, FFN, HEADS = 256, 128, 2  # heads of 128 columns: two tiles of the cast that deals them out
FUSED = {"fuse_qkv_params": True}
OPTIONS: dict[str, dict[str, Any]] = {
    "apart": {},
    "dealt by heads": FUSED,
    "one after the other": {**FUSED, "qkv_weight_interleaved": False},
    "groups": {**FUSED, "num_gqa_groups": 1},
    "RMSNorm, SwiGLU": {**FUSED, "normalization": "RMSNorm", "zero_centered_gamma": True, "activation": "swiglu"},
    "no bias, normed heads": {"bias": False, "qk_norm_type": "RMSNorm", "attn_input_format": "bshd"},
}


#: How far a gradient may be off. Here an ulp in the first norm's weight moves one by 0.14 under current scaling, by 0.11
#: under block scaling: FP8 makes much of last bits.
NOISE = 0.12


def a_layer(device: str = "cpu", **options: Any) -> nn.Module:
    torch.manual_seed(0)
    wanted = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "params_dtype": torch.bfloat16, **options}
    return randomise(te.TransformerLayer(HIDDEN, FFN, HEADS, device=device, **wanted))


def passes(
    layer: nn.Module, recipe: Recipe, forward: Callable[..., Tensor] | None = None, count: int = 4, **options: Any
) -> list[dict[str, Tensor]]:
    """Outputs and gradients of some passes, between which delayed scaling's scales move."""
    found = []
    device = next(layer.parameters()).device
    for number in range(count):
        generator = torch.Generator().manual_seed(number)
        x, dy = (torch.randn(16, 2, HIDDEN, generator=generator).to(device, torch.bfloat16) for _ in range(2))
        layer.zero_grad()
        x.requires_grad_()
        with te.autocast(recipe=recipe):
            y = (forward or layer)(x, **options)
        y.backward(dy)
        assert x.grad is not None
        grads = {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}
        found.append({"y": y.detach(), "dx": x.grad, **grads})
    return found


def one_by_one(layer: nn.Module) -> nn.Module:
    """The same with somebody who listens to one of its modules."""
    layer.layernorm_mlp.register_forward_hook(lambda *_: None)  # type: ignore[union-attr]
    return layer


def furthest(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The largest relative error of a tensor, but for the key's bias, whose gradient is 0 but for rounding."""
    assert found.keys() == wanted.keys()
    errors = {}
    for name, value in wanted.items():
        there, here = (t[name].double() for t in (wanted, found))
        if name.endswith("qkv.bias"):  # q, k, v by whatever turns: k's are a third
            errors[name] = ((here - there).norm() / there.norm()).item() / 2
        elif not name.endswith("key_bias"):
            errors[name] = ((here - there).norm() / value.double().norm()).item()
    return max(errors.values())


@pytest.fixture
def segments(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The segments that ran."""
    ran: list[str] = []

    class Seen:
        @staticmethod
        def apply(x: Tensor, y: Tensor | None, *rest: Any) -> Any:
            ran.append("first" if y is None else "last")
            return segment.Segment.apply(x, y, *rest)

    monkeypatch.setattr(chain, "Segment", Seen)
    return ran


@pytest.mark.parametrize(
    ("options", "name"),
    [(o, name) for i, o in enumerate(OPTIONS) for name in ("delayed", ("current", "row", "block")[i % 3])],
)
def test_it_is_the_layer_of_modules(options: str, name: str, segments: list[str]) -> None:
    """Bit for bit down to the stream's gradient, which is rounded once where the modules' sum of two is rounded twice."""
    recipe = RECIPES[name][0]
    found = passes(a_layer(**OPTIONS[options]), recipe)
    assert segments == ["first", "last"] * 4
    wanted = passes(one_by_one(a_layer(**OPTIONS[options])), recipe)
    assert len(segments) == 8
    for number, (mine, theirs) in enumerate(zip(found, wanted, strict=True)):
        if name != "delayed" or number == 0:  # whose scales follow the gradients' last bits
            assert all(torch.equal(mine[key], theirs[key]) for key in theirs if key == "y" or "mlp" in key)
        assert furthest(mine, theirs) < NOISE


@pytest.mark.parametrize("options", OPTIONS)
def test_queries_and_keys_turn_in_the_projection(options, segments, monkeypatch):
    turns: list[bool] = []
    rotate = rotary_reference.BACKEND.rotate

    def seen(parts: Any, **how: Any) -> None:
        turns.append(how.get("transposed", False))
        rotate(parts, **how)

    monkeypatch.setattr(rotary_reference, "BACKEND", dataclasses.replace(rotary_reference.BACKEND, rotate=seen))
    angles = te.RotaryPositionEmbedding(HIDDEN // HEADS, 0.5).cpu()(20)
    asked, recipe = {**OPTIONS[options], "rotary_pos_interleaved": options == "apart"}, RECIPES["current"][0]
    found = passes(a_layer(**asked), recipe, rotary_pos_emb=angles)
    assert segments == ["first", "last"] * 4
    assert turns == [False, True] * 4
    wanted = passes(one_by_one(a_layer(**asked)), recipe, rotary_pos_emb=angles)
    assert len(turns) == len(segments) == 8
    for mine, theirs in zip(found, wanted, strict=True):
        assert torch.equal(mine["y"], theirs["y"])
        assert furthest(mine, theirs) < NOISE
    assert furthest(found[0], passes(a_layer(**asked), recipe, count=1)[0]) > 2 * NOISE


def test_turned_queries_of_groups_are_copied_by_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of a group between other groups' keys: attention gets them as the kernel wrote them, which is no view."""
    made: list[Tensor] = []
    rotate = rotary_reference.BACKEND.rotate

    def seen(parts: Any, **how: Any) -> None:
        made.extend(part.out for part in parts)
        rotate(parts, **how)

    monkeypatch.setattr(rotary_reference, "BACKEND", dataclasses.replace(rotary_reference.BACKEND, rotate=seen))
    torch.manual_seed(0)
    options: dict[str, Any] = {**FUSED, "num_gqa_groups": 2, "hidden_dropout": 0.0, "attention_dropout": 0.0}
    layer = randomise(te.TransformerLayer(HIDDEN, FFN, 4, device="cpu", **options))
    given: list[Tensor] = []
    core = layer.self_attention.core_attention.forward
    monkeypatch.setattr(
        layer.self_attention.core_attention, "forward", lambda *args, **more: given.extend(args) or core(*args, **more)
    )
    angles, recipe = te.RotaryPositionEmbedding(HIDDEN // 4).cpu()(16), RECIPES["current"][0]
    found = passes(layer, recipe, count=1, rotary_pos_emb=angles)
    q, k, v = given
    assert [t.data_ptr() for t in (q, k)] == [t.data_ptr() for t in made[:2]]
    assert q.is_contiguous()
    assert k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr() != q.untyped_storage().data_ptr()
    assert furthest(*found, *passes(one_by_one(layer), recipe, count=1, rotary_pos_emb=angles)) < NOISE


def test_angles_that_changed_before_the_backward_pass_are_told(segments: list[str]) -> None:
    layer, angles = a_layer(), te.RotaryPositionEmbedding(HIDDEN // HEADS).cpu()(16)
    with te.autocast(recipe=RECIPES["current"][0]):
        y = layer(torch.randn(16, 2, HIDDEN).bfloat16(), rotary_pos_emb=angles)
    angles.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    assert segments == ["first", "last"]


def test_float32_and_torchs_autocast(segments: list[str]) -> None:
    recipe = RECIPES["current"][0]
    for within in (False, True):
        found = []
        for layer in (a_layer(params_dtype=torch.float32), one_by_one(a_layer(params_dtype=torch.float32))):
            x = torch.randn(16, 2, HIDDEN, generator=torch.Generator().manual_seed(1)).requires_grad_()
            with torch.autocast("cpu", torch.bfloat16, enabled=within), te.autocast(recipe=recipe):
                y = layer(x)
            y.sum().backward()
            assert x.grad is not None
            assert y.dtype is (torch.bfloat16 if within else torch.float32)
            assert x.grad.dtype is torch.float32
            grads = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
            found.append({"y": y.detach(), "dx": x.grad, **grads})
        assert furthest(*found) < (NOISE if within else 1e-3)
    assert segments == ["first", "last"] * 2


def test_states_and_numerics_are_the_modules_own(segments: list[str]) -> None:
    states, numerics = [], []
    for how in (lambda layer: layer, one_by_one):  # an autocast that ends takes a step for every living module's scales
        layer = how(a_layer(**FUSED))
        with te.record_numerics():
            passes(layer, DelayedScaling(amax_history_len=4))
        states.append(layer.state_dict())
        numerics.append(te.numerics(layer))
        del layer
    assert len(segments) == 8
    mine, theirs = states
    assert list(mine) == list(theirs)
    for name in (name for name in mine if "fp8_" in name):
        torch.testing.assert_close(mine[name], theirs[name], rtol=0.1, atol=1e-6)
    assert numerics[0].keys() == numerics[1].keys()
    for module, tensors in numerics[1].items():
        for tensor, figures in tensors.items():
            found = numerics[0][module][tensor]["underflowed"]
            # The gradient of the first row's q, which sees one key, is nothing but roundings.
            slack = 2 * HIDDEN if (module, tensor) == ("self_attention.layernorm_qkv", "grad_output") else 8
            assert found == pytest.approx(figures["underflowed"], rel=0.02, abs=slack)


@pytest.mark.parametrize("name", ["delayed", "current", "block"])
def test_a_checkpoint_changes_no_bit(name: str, segments: list[str]) -> None:
    wanted = passes(a_layer(**FUSED), RECIPES[name][0])
    kept = a_layer(**FUSED)
    found = passes(kept, RECIPES[name][0], lambda x: te.checkpoint(kept, x))
    assert segments == ["first", "last"] * 12
    for mine, theirs in zip(found, wanted, strict=True):
        assert all(torch.equal(mine[key], value) for key, value in theirs.items())


def test_kept_weights_are_used_again(segments: list[str]) -> None:
    recipe = RECIPES["current"][0]
    layer = a_layer(**FUSED)
    wanted = passes(layer, recipe, count=1)[0]
    first = passes(layer, recipe, count=1, is_first_microbatch=True)[0]
    with torch.no_grad():
        for p in layer.parameters():
            if p.dim() == 2:
                p.zero_()
    again = passes(layer, recipe, count=1, is_first_microbatch=False)[0]
    assert len(segments) == 6
    for found in (first, again):
        assert all(torch.equal(found[key], value) for key, value in wanted.items())


def test_without_gradients_it_is_the_same(segments: list[str]) -> None:
    layer, recipe = a_layer(**FUSED), RECIPES["current"][0]
    wanted = passes(layer, recipe, count=1)[0]["y"]
    x = torch.randn(16, 2, HIDDEN, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    with torch.no_grad(), te.autocast(recipe=recipe):
        assert torch.equal(layer(x), wanted)
    assert segments == ["first", "last"] * 2


class Wrapped(te.Linear):
    """Another Linear in proj's place."""


REASONS: dict[str, Callable[[Any], Any]] = {
    "a forward hook": lambda layer: layer.self_attention.proj.register_forward_pre_hook(lambda *_: None),
    "a backward hook": lambda layer: layer.layernorm_mlp.register_full_backward_hook(lambda *_: None),
    "frozen": lambda layer: layer.layernorm_mlp.fc1_weight.requires_grad_(False),
    "another module": lambda layer: setattr(layer.self_attention.proj, "__class__", Wrapped),
    "parametrised": lambda layer: nn.utils.parametrize.register_parametrization(
        layer.self_attention.proj, "weight", nn.Identity()
    ),
    "dropout": lambda layer: setattr(layer, "hidden_dropout", 1e-9),
    "norms' outputs as residuals": lambda layer: None,
    "in parallel": lambda layer: None,
    "a norm at the end": lambda layer: None,
}
MADE = {
    "norms' outputs as residuals": {"apply_residual_connection_post_layernorm": True},
    "in parallel": {"parallel_attention_mlp": True},
    "a norm at the end": {"output_layernorm": True},
}


@pytest.mark.parametrize("reason", REASONS)
def test_where_somebody_needs_the_modules_they_are_called(reason: str, segments: list[str]) -> None:
    layer = a_layer(**FUSED, **MADE.get(reason, {}))
    REASONS[reason](layer)
    passes(layer, RECIPES["current"][0], count=1)
    assert not segments


def test_without_fp8_nothing_changes(segments: list[str]) -> None:
    layer = a_layer(**FUSED)
    x = torch.randn(8, 2, HIDDEN).to(torch.bfloat16)
    layer(x)
    with te.autocast(enabled=False, calibrating=True, recipe=DelayedScaling()):
        layer(x)
    assert not segments


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("size", [(16, 0, HIDDEN), (0, 2, HIDDEN)], ids=["no sequences", "no tokens"])
def test_an_empty_batch_gives_an_empty_result_and_zero_gradients(size: tuple[int, ...], options: str) -> None:
    layer = a_layer(**OPTIONS[options])
    x = torch.empty(size, dtype=torch.bfloat16, requires_grad=True)
    for enabled in (True, False):
        layer.zero_grad()
        with te.autocast(enabled=enabled, recipe=RECIPES["current"][0]):
            y = layer(x)
        y.sum().backward()
        assert y.shape == size
        assert all(p.grad is not None and not p.grad.any() for p in layer.parameters())


def test_what_the_modules_refuse_is_refused() -> None:
    layer = a_layer(**FUSED)
    with te.autocast(recipe=RECIPES["current"][0]):
        with pytest.raises(ValueError, match="last dimension must be 256"):
            layer(torch.zeros(8, 2, 128, dtype=torch.bfloat16))
        with pytest.raises(ValueError, match="hidden_states must have 3 dimensions"):
            layer(torch.zeros(8, HIDDEN, dtype=torch.bfloat16))


# By the kernels of a GPU, interpreted


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The fused kernels that ran: their launchers by name, in order."""
    ran: list[str] = []

    def seen(function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            ran.append(name)
            return function(*args, **options)

        return call

    def watched(backend: Any, *names: str) -> Any:
        return dataclasses.replace(backend, **{name: seen(getattr(backend, name), name) for name in names})

    stream = watched(norm_triton.BACKEND.residual, "add_forward_quantized", "add_forward")
    norm = dataclasses.replace(watched(norm_triton.BACKEND, "forward", "backward"), residual=stream)
    names = ("forward_quantized", "backward_quantized")
    activations = watched(activation_triton.BACKEND, "forward", "backward", *names)
    cast = seen(quantize_triton.quantize, "quantize")
    for module in (segment, layernorm):
        monkeypatch.setattr(module, "backend", lambda x: norm)
    for module in (segment, layernorm_mlp):
        monkeypatch.setattr(module, "activation_backend", lambda x: activations)
    monkeypatch.setattr(_recipe.Recipe, "_quantizer", lambda self, x: cast)

    def joined(parts: Any, turn: int, scale: Tensor, dtype: torch.dtype, **looks: Any) -> Any:
        ran.append("joined")
        data, data_t, inverse = _joined.kernel(parts, turn, scale, dtype, looks.get("amax"), looks.get("column_sum"))
        return Quantized(data, inverse, data_t, inverse, Layout(dtype, TENSOR, torch.float32))

    def recomputed(_: Any, *operands: Any, scale: Tensor, dtype: torch.dtype, **options: Any) -> Any:
        ran.append("recomputed")
        values = options.pop("value_scale"), options.pop("value_dtype")
        looks = {name: options.get(name) for name in ("amax", "counts", "column_sum")}
        return _recomputed.kernel(*operands, scale, dtype, *values, **looks)

    monkeypatch.setattr(segment.joined, "joined", joined)
    monkeypatch.setattr(segment.recomputed, "recomputed", recomputed)
    return ran


#: Forward: norm and cast; the context's cast; addition, norm and cast; the activation and its cast. Backward: the output
#: gradient's cast; the activation's gradient, it again, both cast; the norm's with the stream's; its cast; q, k, v; norm.
DELAYED = ["add_forward_quantized", "quantize", "add_forward_quantized", "forward_quantized"]
DELAYED += ["quantize", "recomputed", "backward", "quantize", "joined", "backward"]
#: By the finished tensor's own amax every cast is a kernel of its own.
CURRENT = ["add_forward", "quantize", "quantize", "add_forward", "quantize", "forward", "quantize"]
CURRENT += ["quantize", "backward", "quantize", "backward", "quantize", "quantize", "backward"]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.parametrize(("name", "wanted"), [("delayed", DELAYED), ("current", CURRENT)])
def test_the_fused_kernels_are_what_runs(name, wanted, kernels, monkeypatch):
    layer, recipe = a_layer(**FUSED), RECIPES[name][0]
    found = passes(layer, recipe, count=1)[0]
    ours = [*kernels]
    for _ in range(4):  # the weights', each before its GEMM
        ours.remove("quantize")
    assert sorted(ours) == sorted(wanted)
    assert ours.count("joined") == wanted.count("joined")
    monkeypatch.undo()
    exact = passes(a_layer(**FUSED), recipe, count=1)[0]
    assert furthest(found, exact) < 0.05


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("turning", [False, True], ids=["", "rotary"])
@pytest.mark.parametrize("name", ["delayed", "current", "row", "block"])
@pytest.mark.parametrize("options", ["dealt by heads", "groups", "RMSNorm, SwiGLU"])
def test_on_a_gpu_it_is_the_layer_of_modules(options: str, name: str, turning: bool, segments: list[str]) -> None:
    recipe = RECIPES[name][0]
    given = {"rotary_pos_emb": te.RotaryPositionEmbedding(HIDDEN // HEADS)(16)} if turning else {}
    found, wanted = (
        passes(how(a_layer("cuda", **OPTIONS[options])), recipe, **given) for how in (lambda layer: layer, one_by_one)
    )
    assert len(segments) == 8
    for mine, theirs in zip(found, wanted, strict=True):
        assert furthest(mine, theirs) < NOISE


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["delayed", "current", "row", "block"])
def test_a_captured_pass_is_the_eager_one(name: str) -> None:
    recipe = RECIPES[name][0]
    layer = a_layer("cuda", **FUSED)
    x, dy = (torch.randn(16, 2, HIDDEN, device="cuda", dtype=torch.bfloat16) for _ in range(2))

    def both() -> Tensor:
        with te.autocast(recipe=recipe):
            y: Tensor = layer(x)
        y.backward(dy)
        return y.detach()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(12):  # whose amaxes fill the histories: scales stay as they are
            both()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = both()
    layer.zero_grad(set_to_none=False)
    graph.replay()
    replayed = [y.clone(), *(p.grad.clone() for p in layer.parameters() if p.grad is not None)]
    layer.zero_grad(set_to_none=False)
    eager = [both(), *(p.grad for p in layer.parameters() if p.grad is not None)]
    assert all(torch.equal(a, b) for a, b in zip(replayed, eager, strict=True))
