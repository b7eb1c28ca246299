"""The layer's trial: what is in its record, and the faults that its check has to catch."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from planting import only_timed
from torch import Tensor, nn

import te_bench.models as te
from te_bench.experiments import suite_trials
from te_bench.experiments.instruments import energy, profiling
from te_bench.experiments.measurement import CheckFailed, Context, Unsupported
from te_bench.experiments.spec import Trial
from te_bench.experiments.suites.layer import GPU
from te_bench.experiments.workloads import layer as workload
from te_bench.models import quickstart as layers
from te_bench.models import recipe as recipes
from te_bench.models.quickstart import Layer
from te_bench.models.recipe import Format

PROBLEM = {"layer": "te_layer", "variant": "fair", "hidden": 64, "ffn": 128, "heads": 4, "sequence": 32, "batch": 2}
PROBLEM |= {"dropout": 0.0, "mask": "causal"}
TRIAL = Trial(
    workload="layer", device="cpu", problem=PROBLEM, attention="flash", precision="fp32", protocol="quickstart"
)
FP8: dict[str, Any] = {"precision": "fp8", "recipe": "float8_current_scaling"}
RECIPES = suite_trials.recipes()


def changed(*, attention: str = "flash", precision: str = "fp32", recipe: str | None = None, **problem: Any) -> Trial:
    return dataclasses.replace(
        TRIAL, attention=attention, precision=precision, recipe=recipe, problem={**PROBLEM, **problem}
    )


def check(trial: Trial) -> dict[str, Any]:
    rival, p = layers.load(str(trial.problem["layer"])), workload.config_of(trial)
    return workload.check_layer(trial, rival, p, workload.Iteration(rival, p, trial.seed))


@pytest.fixture
def brief(brief: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(energy, "WINDOW_S", 1.0)


def test_a_record_has_every_iteration_the_check_and_where_the_time_went() -> None:
    found = workload.run(TRIAL, Context())
    assert len(found.samples["latency_s"]) == 50
    assert found.samples["peak_rss_bytes"][0] > 2**20
    names = {q["name"] for q in found.check["quantities"]}
    assert {"output - x", "dx - dy", "grad qkv_projection.weight k", "grad mlp.linear2.bias"} <= names
    parts = 2 + 12 + 2  # twelve parameters, the weight of QKV in three parts
    assert len(names) == 3 * parts  # the whole, its scale and its worst row
    assert found.work["tokens"] == 64
    seconds = found.work["kernel_s"]
    assert list(seconds.values()) == sorted(seconds.values(), reverse=True) or "others" in list(seconds)[-1]
    assert {"aten::mm"} < set(seconds)
    assert 0 < sum(seconds.values()) < 1
    assert any("flash" in name for name in found.kernels)
    assert "numerics" not in found.work


def test_a_long_tail_of_kernels_is_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "KERNELS", 2)
    rival, p = layers.load("te_layer"), workload.config_of(TRIAL)
    seconds = profiling.kernel_seconds(workload.Iteration(rival, p, 0), "cpu")
    assert len(seconds) == 3
    assert list(seconds)[-1].endswith("others)")


def test_flop_is_the_quickstart_s() -> None:
    """The facts: GEMMs 19.8 and attention 1.65 full, 0.82 causal TFLOP at batch 8; here batch 4."""
    sizes = {"full": workload.config_of(changed(**{**GPU, "mask": "full"}))}
    sizes["causal"] = dataclasses.replace(sizes["full"], mask="causal")
    assert workload.flop(sizes["full"]) / 1e12 == pytest.approx(9.9 + 0.825, abs=0.02)
    assert workload.flop(sizes["causal"]) / 1e12 == pytest.approx(9.9 + 0.41, abs=0.02)


#: The layer of a model.
LLAMA = {"model": "llama-tiny", "hidden": 64, "ffn": 192, "heads": 4, "sequence": 64}


def test_flop_of_a_models_layer_by_hand() -> None:
    """Llama 3 8B: 218 M weights; 32 heads of 128 see half of 8,192 keys."""
    sizes = {"model": "llama3-8b", "hidden": 4096, "ffn": 14336, "heads": 32, "sequence": 8192, "batch": 1}
    p = workload.config_of(changed(**sizes))
    weights = 4096 * (4096 + 1024 + 1024) + 4096 * 4096 + 3 * 4096 * 14336
    assert workload.gemm_flop(p) == 8192 * 6 * weights
    assert workload.flop(p) - workload.gemm_flop(p) == 8192 * 12 * 8192 * 4096 // 2


@pytest.mark.parametrize("recipe", [None, *RECIPES])
def test_a_models_layer_passes_its_check(recipe: str | None, brief: None) -> None:
    found = workload.run(changed(precision="fp8" if recipe else "bf16", recipe=recipe, **LLAMA), Context())
    names = {q["name"] for q in found.check["quantities"]}
    gradients = {f"grad {name}" for name in ("ln1.weight", "qkv_projection.weight k", "mlp.linear2.weight")}
    assert {"output - x", "dx - dy"} | gradients <= names
    assert not any("bias" in name for name in names)
    assert found.work["ran"]["gemm_fp8" if recipe else "gemm_half"] == 12


@pytest.mark.parametrize("name", ["te_basic", "te_fused", "plain_sdpa"])
def test_every_step_of_the_quickstart_is_a_models_layer_as_well(name: str, brief: None) -> None:
    workload.run(changed(layer=name, **LLAMA), Context())


def test_a_reference_by_parts_is_the_whole_one(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = check(changed(**LLAMA))
    calls: list[Any] = []
    by_heads = workload.large.by_heads
    monkeypatch.setattr(workload.large, "LARGE", 4 * 64**2 - 1)
    monkeypatch.setattr(workload.large, "by_heads", lambda *a, **k: calls.append(a) or by_heads(*a, **k))
    parts = check(changed(**LLAMA))
    assert len(calls) == 2  # float64's and the yardstick's
    for one, other in zip(whole["quantities"], parts["quantities"], strict=True):
        assert one["name"] == other["name"]
        assert one["limit"] == pytest.approx(other["limit"], rel=0.05)
        assert one["error"] == pytest.approx(other["error"], rel=0.05, abs=1e-8)


OTHER = [({"mask": "full"}, {})]
OTHER += [(fault, LLAMA) for fault in ({"model": None}, {"by_head": True}, {"activation": "geglu"}, {"eps": 0.5})]


@pytest.mark.parametrize(("fault", "asked"), OTHER)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_another_layer_is_caught(monkeypatch, fault, asked, precision):
    """The other mask, heads that do not turn, rows of another order, another gate, another epsilon."""
    build = layers.load("te_layer").build
    planted(monkeypatch, build=lambda p: build(dataclasses.replace(p, **fault)))
    with pytest.raises(CheckFailed, match=r"error .* > "):
        check(changed(precision=precision, **asked))


def test_x_needs_no_gradient_and_gradients_accumulate() -> None:
    rival, p = layers.load("te_layer"), workload.config_of(TRIAL)
    iteration = workload.Iteration(rival, p, 0)
    iteration()
    weight = iteration.module.get_parameter("self_attention.proj.weight")
    once = weight.grad.clone()
    with iteration.context():
        y = iteration.module(iteration.x)
    torch.testing.assert_close(once, torch.autograd.grad(y, weight, iteration.dy)[0])
    iteration()
    torch.testing.assert_close(weight.grad, 2 * once)
    assert iteration.x.grad is None
    assert 0 <= iteration.x.min() <= iteration.x.max() < 1
    assert 0 <= iteration.dy.min() <= iteration.dy.max() < 1
    assert not torch.equal(iteration.x, iteration.dy)


def test_rivals_share_weights_and_data_and_the_seed_decides_them() -> None:
    plain = workload.Iteration(layers.load("plain"), workload.config_of(changed(attention="manual")), 3)
    fused = workload.Iteration(layers.load("te_fused"), workload.config_of(TRIAL), 3)
    other = workload.Iteration(layers.load("te_fused"), workload.config_of(TRIAL), 4)
    one, other_s = plain.module.get_parameter("mlp.linear1.weight"), fused.module.get_parameter("ln_mlp.fc1_weight")
    assert torch.equal(one, other_s)
    assert torch.equal(plain.x, fused.x)
    assert torch.equal(plain.dy, fused.dy)
    assert not torch.equal(fused.x, other.x)


@pytest.mark.parametrize("recipe", [None, "delayed_scaling", "float8_block_scaling"])
def test_the_mlp_alone_passes_its_check(recipe: str | None, brief: None) -> None:
    precision = "fp8" if recipe else "fp32"
    trial = changed(variant="mlp", attention="none", precision=precision, recipe=recipe)
    found = workload.run(trial, Context())
    names = {q["name"] for q in found.check["quantities"]}
    assert {"output", "dx", "grad ln2.weight", "grad mlp.linear1.bias", "grad mlp.linear2.weight"} <= names
    assert found.work["gemm_flop"] == found.work["flop"] == 64 * 12 * 64 * 128
    assert not any("attention" in name for name in found.kernels)
    assert ("layernorm_mlp" in found.work.get("numerics", {})) is (recipe is not None)


@pytest.mark.parametrize("fault", ["a scaled output", "no gradient", "the other sign", "twice"])
def test_a_fault_of_the_mlp_is_caught(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    rival = layers.load("te_layer")
    names = {name: f"layer.{own}" for name, own in rival.names.items()}
    planted(monkeypatch, build=lambda p: Faulty(rival.build(p), fault, "layernorm_mlp.fc1_weight"), names=names)
    with pytest.raises(CheckFailed, match=r"error .* > "):
        check(changed(variant="mlp", attention="none"))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("layer", ["te_basic", "te_layer"])
def test_fp8_passes_its_check(layer: str, recipe: str) -> None:
    settings = {"amax_history_len": 16} if recipe == "delayed_scaling" else {}
    found = check(changed(layer=layer, precision="fp8", recipe=recipe, **settings))
    ratio = next(q["error"] for q in found["quantities"] if q["name"] == "grad, ratio to FP8 emulation")
    assert 0.9 < ratio < 1.1


@pytest.mark.parametrize("recipe", ["float8_current_scaling", "rowwise_scaling"])
def test_fp8_is_held_to_the_recipe_with_its_settings(recipe: str) -> None:
    found = check(changed(layer="te_basic", precision="fp8", recipe=recipe, bf16_wgrad=True))
    ratio = next(q["error"] for q in found["quantities"] if q["name"] == "grad, ratio to FP8 emulation")
    assert 0.95 < ratio < 1.05


def test_a_record_in_fp8_tells_its_numerics(brief: None) -> None:
    found = workload.run(changed(**FP8), Context())
    assert found.work["numerics"]["layernorm_mlp"]
    assert all(q["error"] <= q["limit"] for q in found.check["quantities"])


def test_with_dropout_the_check_is_made_without(brief: None) -> None:
    found = workload.run(changed(layer="plain", attention="manual", dropout=0.5, mask="full"), Context())
    assert max(q["error"] for q in found.check["quantities"] if not q["name"].endswith("worst row")) < 1e-5


class Faulty(nn.Module):
    """A layer whose input or output, or the gradient of one of whose parameters, a fault goes through."""

    def __init__(self, layer: nn.Module, fault: str, weight: str = "projection.weight"):
        super().__init__()
        self.layer = layer
        self.before, self.after, gradient = FAULTS[fault]
        self.layer.get_parameter(weight).register_hook(gradient)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.layer(self.before(x)))


def planted(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Every rival but plain, the reference, with these fields changed."""
    original = layers.load

    def load(name: str) -> Layer:
        found = original(name)
        return found if name == "plain" else dataclasses.replace(found, **changes)

    monkeypatch.setattr(layers, "load", load)


def same(x: Tensor) -> Tensor:
    return x


#: What becomes of the input, of the output and of a parameter's gradient.
FAULTS: dict[str, tuple[Callable[[Tensor], Tensor], ...]] = {
    "one sequence too few": (same, lambda y: torch.cat([y[:, :1], y[:, :1]], dim=1), same),
    "a scaled output": (same, lambda y: 1.05 * y, same),
    "no gradient": (same, same, lambda gradient: 0 * gradient),
    "the other sign": (same, same, lambda gradient: -gradient),
    "twice": (same, same, lambda gradient: 2 * gradient),
    "transposed": (same, same, lambda gradient: gradient.t()),
    "twice the gradient of x": (lambda x: x + (x - x.detach()), same, same),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_fault_is_caught(monkeypatch: pytest.MonkeyPatch, fault: str, precision: str) -> None:
    build = layers.load("plain_sdpa").build
    names = {name: f"layer.{name}" for name, _ in build(workload.config_of(TRIAL)).named_parameters()}
    planted(monkeypatch, build=lambda p: Faulty(build(p), fault), names=names)
    of_x = fault == "twice the gradient of x"
    with pytest.raises(CheckFailed, match=r"dx - dy.*: error .* > .*\(3 of 48" if of_x else r"error .* > "):
        check(changed(layer="plain_sdpa", precision=precision))


def other_recipe(recipe: recipes.Recipe) -> Callable[[Any], Any]:
    return lambda p: lambda: te.fp8_autocast(enabled=True, fp8_recipe=recipe)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_layer_that_quietly_ran_in_bf16_is_caught(monkeypatch: pytest.MonkeyPatch, recipe: str) -> None:
    planted(monkeypatch, context=lambda p: contextlib.nullcontext)
    with pytest.raises(CheckFailed, match="ratio of FP8 emulation to it"):
        check(changed(precision="fp8", recipe=recipe))


class WrongFormat(recipes.Float8CurrentScaling):
    """E5M2 forward, which a recipe refuses when it is asked."""

    def dtype(self, role: str) -> torch.dtype:
        return torch.float8_e5m2


def test_e5m2_in_e4m3_s_place_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, context=other_recipe(WrongFormat()))
    with pytest.raises(CheckFailed, match=r"ratio to FP8 emulation|error .* > "):
        check(changed(**FP8))


def test_gradients_in_e4m3_where_the_recipe_says_e5m2_err_less_and_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, context=other_recipe(recipes.Float8CurrentScaling(fp8_format=Format.E4M3)))
    check(changed(**FP8))


@pytest.mark.parametrize(
    ("trial", "reason"),
    [
        (dataclasses.replace(TRIAL, mode="cudagraph"), "cudagraph: CUDA graphs need an NVIDIA GPU"),
        (dataclasses.replace(TRIAL, mode="compile-reduce-overhead"), "the layer runs eager, compile or cudagraph"),
        (dataclasses.replace(TRIAL, mode="compile-blocks"), "the layer runs eager, compile or cudagraph"),
        (changed(variant="mlp"), "attention flash: the variant mlp computes none"),
        (changed(attention="none"), "attention none: the variant mlp computes none"),
        (changed(attention="none", layer="te_basic", variant="mlp"), "te_basic has no MLP of its own"),
        (dataclasses.replace(TRIAL, attention="cudnn"), "cudnn: needs an NVIDIA GPU"),
        (changed(precision="fp16"), "fp16: half-precision training is for GPUs"),
        (changed(layer="plain"), "attention flash: plain writes attention out"),
        (changed(layer="torchao_tensorwise", **FP8), "needs torchao: pip install torchao"),
        (changed(model="tiny", ffn=256), "model tiny: its LayerNorms have no bias"),
    ],
)
def test_what_cannot_run_is_unsupported_with_the_reason(trial: Trial, reason: str) -> None:
    with pytest.raises(Unsupported, match=reason):
        workload.run(trial, Context())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask": "bidirectional"}, "mask 'bidirectional': full or causal"),
        ({"heads": 5}, "hidden 64 is not a multiple of 5 heads"),
        ({"model": "llama-tiny"}, "hidden, ffn and heads are 64, 128 and 4; those of llama-tiny: (64, 192, 4)"),
        ({"model": "llama-tony"}, "unknown model 'llama-tony'. Did you mean llama-tiny"),
        ({"hidden": None}, "layer needs a whole number for 'hidden', got None"),
        ({"layer": "te_leyer"}, "unknown layer 'te_leyer'. Did you mean te_layer"),
    ],
)
def test_a_problem_that_is_none_says_what_is_wrong(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        workload.run(changed(**changes), Context())
    assert message in str(caught.value)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["eager", "compile", "cudagraph"])
@pytest.mark.parametrize("recipe", [None, "delayed_scaling", "float8_current_scaling"])
def test_on_a_gpu_the_layer_passes_and_its_kernels_are_timed(brief: None, mode: str, recipe: str | None) -> None:
    sizes = {"hidden": 512, "ffn": 2048, "heads": 8, "sequence": 256, "batch": 2}
    trial = changed(attention="cudnn", precision="fp8" if recipe else "bf16", recipe=recipe, **sizes)
    found = workload.run(dataclasses.replace(trial, device="cuda", mode=mode), Context())
    assert any("sdpa" in name for name in found.work["kernel_s"])
    assert not any(name.startswith("aten::") for name in found.work["kernel_s"])
    assert 1e-5 < sum(found.work["kernel_s"].values()) < 1
    assert found.samples["peak_allocated_bytes"][0] > 2**20
    assert 0 < found.samples["energy_j"][0] < 10


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "tokens"), [(4, 2048), (1, 8192)])
@pytest.mark.parametrize(
    ("layer", "mode", "recipe"),
    [
        ("plain_sdpa", "compile", None),
        ("te_layer", "eager", None),
        ("te_layer", "compile", "delayed_scaling"),
        *(("te_layer", "cudagraph", recipe) for recipe in RECIPES),
    ],
)
def test_on_a_gpu_llama_3_8b_s_layer_passes(brief, layer, mode, recipe, batch, tokens):
    sizes = {"model": "llama3-8b", "hidden": 4096, "ffn": 14336, "heads": 32, "sequence": tokens, "batch": batch}
    trial = changed(layer=layer, attention="cudnn", precision="fp8" if recipe else "bf16", recipe=recipe, **sizes)
    found = workload.run(dataclasses.replace(trial, device="cuda", mode=mode), Context())
    assert found.work["ran"]["gemm_fp8" if recipe else "gemm_half"] == 12


@pytest.mark.parametrize("asked", [{}, {"layer": "plain_sdpa"}, FP8], ids=["bf16", "plain", "FP8"])
@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (lambda self, x, right: right(self, x) * 0, "^output, timed"),
        (lambda self, x, right: self.forward(x).detach(), "^grad .*, timed"),
    ],
    ids=["output", "no backward pass"],
)
def test_a_layer_that_is_wrong_only_when_timed_fails(wrong, reason, asked, monkeypatch, brief):
    trial = changed(**{"precision": "bf16", **asked})
    workload.run(trial, Context())
    now, right = only_timed(monkeypatch, "quickstart"), workload.Iteration.passes
    passes = lambda self, x: wrong(self, x, right) if now() else right(self, x)  # noqa: E731
    monkeypatch.setattr(workload.Iteration, "passes", passes)
    with pytest.raises(CheckFailed, match=reason):
        workload.run(trial, Context())
