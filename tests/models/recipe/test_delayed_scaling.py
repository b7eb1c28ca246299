"""DelayedScaling step by step against a plain re-implementation: dictionaries of histories and explicit loops."""

import gc
import math
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from fp8_emulation import FORMATS, Fp8, compute, linear
from torch import Tensor

import te_bench.models as te
from te_bench.models import fp8, recipe

ROLES = ("input", "weight", "grad_output")
FLOAT32_MAX = float(np.finfo(np.float32).max)


class Plain:
    """What Transformer Engine's documentation says, tensor by tensor; facts in shared/facts/transformer-engine.md.

    An amax waits until the next update. There, 0 changes nothing; infinity and NaN are counted and leave a 0 behind.
    """

    def __init__(self, length: int, margin: int = 0, algorithm: str = "max", backward: str = "e5m2"):
        self.length, self.margin, self.algorithm = length, margin, algorithm
        self.limit = {"input": 448.0, "weight": 448.0, "grad_output": FORMATS[backward][2]}
        self.scale = dict.fromkeys(ROLES, 1.0)
        self.past: dict[str, list[float]] = {role: [] for role in ROLES}  # the newest first
        self.waiting = dict.fromkeys(ROLES, 0.0)
        self.bad = dict.fromkeys(ROLES, 0)

    def see(self, role: str, x: Tensor) -> None:
        amax = float(x.detach().abs().max())
        if math.isnan(amax) or math.isnan(self.waiting[role]):
            self.waiting[role] = math.nan
        else:
            self.waiting[role] = max(self.waiting[role], amax)

    def update(self) -> None:
        for role in ROLES:
            amax, self.waiting[role] = self.waiting[role], 0.0
            if amax == 0.0:
                continue
            if not math.isfinite(amax):
                self.bad[role] += 1
                self.past[role] = [0.0, *self.past[role]][: self.length]
                continue
            self.past[role] = [amax, *self.past[role]][: self.length]
            if self.algorithm == "max":
                amax = max(self.past[role])
            with np.errstate(over="ignore"):
                scale = np.float32(self.limit[role]) / np.float32(amax) / np.float32(2.0**self.margin)
            self.scale[role] = min(float(scale), FLOAT32_MAX)

    def fp8(self, backward: str) -> Fp8:
        return Fp8(backward=backward, scales={(role, 0): scale for role, scale in self.scale.items()})


def scales(layer: te.Linear) -> dict[str, float]:
    return {role: figures["scale"] for role, figures in te.numerics(layer)[""].items()}


def past(layer: te.Linear, role: str) -> list[float]:
    """A tensor's history, the newest first, without the row that gathers."""
    name, column = {"input": ("fwd", 0), "weight": ("fwd", 1), "grad_output": ("bwd", 0)}[role]
    history = layer.state_dict()[f"fp8_amax_history_{name}"][:, column].tolist()
    return history[:0:-1]


def make(seed: int = 0, device: str = "cpu") -> te.Linear:
    torch.manual_seed(seed)
    return te.Linear(24, 16, device=device)


def changing(step: int) -> tuple[Tensor, Tensor]:
    """Data whose amax goes up and down over 50 steps, gradients far from 1."""
    generator = torch.Generator().manual_seed(step)
    up = 2.0 ** (6 * math.sin(step / 3.0))
    return torch.randn(8, 24, generator=generator) * up, torch.randn(8, 16, generator=generator) * 1e-4 / up


@pytest.mark.parametrize(
    ("length", "margin", "algorithm", "form"),
    [(1, 0, "max", "HYBRID"), (3, 0, "max", "HYBRID"), (16, 1, "max", "E4M3"), (3, 2, "most_recent", "HYBRID")],
)
def test_fifty_steps_are_the_plain_implementations(length: int, margin: int, algorithm: str, form: str) -> None:
    layer, backward = make(), "e4m3" if form == "E4M3" else "e5m2"
    plain = Plain(length, margin, algorithm, backward)
    asked = recipe.DelayedScaling(
        margin=margin, fp8_format=recipe.Format[form], amax_history_len=length, amax_compute_algo=algorithm
    )
    for step in range(50):
        x, dy = changing(step)
        with torch.no_grad():
            layer.weight.mul_(1.0 + 0.5 * math.cos(step))
        layer.zero_grad()
        forward = dict(plain.scale)
        x.requires_grad_()
        with te.autocast(recipe=asked):
            y = layer(x)
        plain.see("input", x)
        plain.see("weight", layer.weight)
        plain.update()  # with the gradients' amax of the last step's backward pass
        assert scales(layer) == plain.scale, step
        y.backward(dy)
        plain.see("grad_output", dy)
        used = plain.fp8(backward).scales
        assert used is not None
        used.update({("input", 0): forward["input"], ("weight", 0): forward["weight"]})
        fp8 = Fp8(backward=backward, scales=used)
        expected = compute(linear, dict(layer.named_parameters()), x, dy, fp8, torch.float32)
        ours = {"y": y, "dx": x.grad, "weight": layer.weight.grad, "bias": layer.bias.grad}
        for name, value in ours.items():
            error = (value.double() - expected[name]).norm()
            assert error <= 2e-6 * expected[name].norm(), (step, name)
        for role in ROLES:
            kept = [*plain.past[role], *[0.0] * length][: length - 1]
            assert past(layer, role) == kept, (step, role)


def _mean(history: Tensor) -> Tensor:
    """A user's own choice: the mean of what the history holds, the row that gathers included."""
    return history.sum(0) / (history > 0).sum(0).clamp(min=1)


def _halved(amax: Tensor, scale: Tensor, limit: Tensor, asked: Any) -> Tensor:
    assert isinstance(asked, recipe.DelayedScaling)
    return limit / amax / 2


@pytest.mark.parametrize(
    ("amax", "scale", "expected"),
    [(_mean, None, 448.0 / 5.0), ("max", _halved, 448.0 / 8.0 / 2), ("most_recent", _halved, 448.0 / 2.0 / 2)],
)
def test_own_functions_decide(amax: Any, scale: Any, expected: float) -> None:
    layer = make()
    asked = recipe.DelayedScaling(amax_history_len=4, amax_compute_algo=amax, scaling_factor_compute_algo=scale)
    for value in (8.0, 2.0):
        with te.autocast(recipe=asked):
            y = layer(torch.full((4, 24), value))
    assert scales(layer)["input"] == np.float32(expected)
    assert scales(layer)["grad_output"] == 1.0  # nothing was gathered: no function's answer counts
    y.sum().backward()


@pytest.mark.parametrize("margin", [0, 2])
@pytest.mark.parametrize("length", [1, 2, 5])
def test_an_own_maximum_is_the_built_in_one(length: int, margin: int) -> None:
    """Scales, margin included, and what the history holds, step by step."""

    def steps(algorithm: Any) -> list[Any]:
        layer, seen = make(), []
        asked = recipe.DelayedScaling(margin=margin, amax_history_len=length, amax_compute_algo=algorithm)
        for step in range(12):
            x, dy = changing(step)
            with te.autocast(recipe=asked):
                y = layer(x)
            seen.append((scales(layer), [past(layer, role) for role in ROLES]))
            y.backward(dy)
        return seen

    assert steps(lambda history: history.amax(0)) == steps("max")


@pytest.mark.parametrize("length", [1, 2, 4, 6, 9])
def test_another_length_keeps_the_newest_steps(length: int) -> None:
    layer = make()
    for amax in (64.0, 32.0, 16.0, 8.0, 4.0):
        with te.autocast(recipe=recipe.DelayedScaling(amax_history_len=6)):
            layer(torch.full((4, 24), amax))
    assert past(layer, "input") == [4.0, 8.0, 16.0, 32.0, 64.0]
    with te.autocast(recipe=recipe.DelayedScaling(amax_history_len=length)):
        layer(torch.full((4, 24), 2.0))
    seen = [2.0, 4.0, 8.0, 16.0, 32.0, 64.0]
    assert past(layer, "input") == [*seen, 0.0, 0.0][: length - 1]
    assert scales(layer)["input"] == 448.0 / max(seen[: max(1, length)])


# ---- zeros, infinities and NaN


@pytest.mark.parametrize("algorithm", ["max", "most_recent", lambda history: history.amax(0)])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_one_bad_value_is_counted_and_freezes_nothing(bad: float, algorithm: Any) -> None:
    """Transformer Engine keeps an infinite amax in the history: under max, scales stand still for the whole window."""
    layer = make()
    asked = recipe.DelayedScaling(amax_history_len=16, amax_compute_algo=algorithm)

    def step(value: float) -> float:
        x = torch.ones(4, 24)
        x[1, 2] = value
        with te.autocast(recipe=asked):
            layer(x)
        return scales(layer)["input"]

    assert step(4.0) == 112.0
    assert step(bad) == 112.0
    assert step(8.0) == 56.0  # the very next step moves the scale again
    figures = te.numerics(layer)[""]["input"]
    assert figures["nonfinite_amax"] == 1
    assert figures["amax"] == 8.0
    assert te.numerics(layer)[""]["weight"]["nonfinite_amax"] == 0


def test_zeros_keep_scale_and_history() -> None:
    layer = make()
    for value in (4.0, 0.0, 0.0, 0.0):
        with te.autocast(recipe=recipe.DelayedScaling(amax_history_len=3)):
            layer(torch.full((4, 24), value))
    assert scales(layer)["input"] == 112.0
    assert past(layer, "input") == [4.0, 0.0]


def test_a_tiny_amax_gives_the_largest_float_not_infinity() -> None:
    layer = make()
    for _ in range(2):
        with te.autocast(recipe=recipe.DelayedScaling()):
            y = layer(torch.full((4, 24), 1e-40))
    assert scales(layer)["input"] == FLOAT32_MAX
    assert y.isfinite().all()


# ---- what counts as a step


def step(layer: te.Linear, amax: float = 4.0, **options: Any) -> Tensor:
    with te.autocast(recipe=recipe.DelayedScaling(amax_history_len=3), **options):
        return layer(torch.full((4, 24), amax))


def test_an_evaluation_leaves_no_trace() -> None:
    layer = make()
    step(layer).sum().backward()
    step(layer).sum().backward()
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    with torch.no_grad():
        step(layer, 100.0)
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
    with torch.no_grad():
        fresh = make()
        step(fresh, 100.0)
    assert scales(fresh)["input"] == 1.0


def test_only_the_outermost_autocast_takes_a_step() -> None:
    layer, asked = make(), recipe.DelayedScaling(amax_history_len=3)
    with te.autocast(recipe=asked):
        with te.autocast(recipe=asked):
            layer(torch.full((4, 24), 2.0))
        assert scales(layer)["input"] == 1.0
        with te.autocast(enabled=False):
            assert not te.is_fp8_enabled()
            exact = layer(torch.full((4, 24), 1000.0))
        assert te.is_fp8_enabled()
        layer(torch.full((4, 24), 8.0))  # a second forward: the larger amax of both counts
    assert scales(layer)["input"] == 56.0
    assert torch.allclose(exact, torch.nn.functional.linear(torch.full((4, 24), 1000.0), layer.weight, layer.bias))
    assert past(layer, "input") == [8.0, 0.0]


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many states each region stepped, but for those of other tests' compiled code, which every region steps."""
    monkeypatch.setattr(fp8, "_silent", weakref.WeakValueDictionary())
    monkeypatch.setattr(fp8, "_held", {})
    found: list[int] = []
    update = recipe.DelayedScaling.update

    def spied(self: recipe.DelayedScaling, states: Any, group: Any = None) -> None:
        found.append(len(states))
        update(self, states)

    monkeypatch.setattr(recipe.DelayedScaling, "update", spied)
    return found


def test_a_region_moves_only_what_it_used(shared: list[int]) -> None:
    """The gradients of another model wait for its own next region; evaluations and a failed region use nothing."""
    layer, other = make(), make()
    step(layer).sum().backward()
    step(other, 64.0)
    assert scales(layer)["grad_output"] == 1.0
    assert (scales(layer)["input"], past(layer, "input")) == (112.0, [4.0, 0.0])
    with pytest.raises(ValueError, match="last dimension"), te.autocast(recipe=recipe.DelayedScaling()):
        other(layer(torch.ones(4, 24)))
    assert not te.is_fp8_enabled()
    with te.autocast(recipe=recipe.DelayedScaling(amax_history_len=3)):
        with torch.no_grad():
            other(torch.full((4, 24), 1.0))
        layer(torch.full((4, 24), 4.0))
    assert scales(layer)["grad_output"] == 57344.0
    assert shared == [1, 1, 1]


def test_ranks_share_no_amaxes_of_a_model_that_is_gone(shared: list[int]) -> None:
    """In a cycle, as FSDP's are, it lives until Python collects garbage, which each rank does at another time."""
    layers = [make() for _ in range(3)]
    gc.disable()
    try:
        while layers:
            for layer in layers:
                layer.cycle = [layer]
                step(layer, amax_reduction_group=object())
            del layers[0], layer
    finally:
        gc.enable()
    assert shared == [1] * 6


def test_compiled_code_shares_as_many_amaxes_whenever_garbage_is_collected(shared: list[int]) -> None:
    """It tells nobody what it used: a model that is gone counts on, on ranks that collected it and on others."""
    asked, group = recipe.DelayedScaling(amax_history_len=5), object()
    for expected, shape in ((1, (24, 16)), (2, (16, 32)), (2, None)):
        if shape:
            layer = te.Linear(*shape, device="cpu")
            run = torch.compile(layer, backend="eager")
        else:
            gc.collect()
        for _ in range(2):
            with te.autocast(recipe=asked, amax_reduction_group=group):
                run(torch.ones(4, layer.in_features))
        assert shared[-2:] == [expected] * 2
        assert scales(layer)["input"] == 448.0


def test_compiled_code_steps_a_module_that_began_without_it() -> None:
    """Of the same shape as one before it, it would run the code that is there, and say nothing of its state."""
    first, layer = make(), make()
    step(torch.compile(first, backend="eager"))
    step(layer)
    with te.autocast(recipe=recipe.DelayedScaling(amax_history_len=3)):
        torch.compile(layer, backend="eager")(torch.full((4, 24), 8.0))
    assert scales(layer)["input"] == 56.0


def test_replays_of_a_cuda_graph_step_what_was_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make()
    step(layer)
    with te.autocast(recipe=recipe.DelayedScaling(amax_history_len=3)), monkeypatch.context() as capturing:
        capturing.setattr(torch.cuda, "is_initialized", lambda: True)
        capturing.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        layer(torch.ones(4, 24))
    with te.autocast(recipe=recipe.DelayedScaling(amax_history_len=3)):  # a replay: no Python runs in it
        layer.recipe_state()["amax_history_fwd"][0, 0].fill_(8.0)
    assert scales(layer)["input"] == 56.0


def test_calibration_gathers_amaxes_and_computes_in_high_precision() -> None:
    layer, x = make(), torch.full((4, 24), 3.3)
    with te.autocast(enabled=False, calibrating=True, recipe=recipe.DelayedScaling()):
        y = layer(x)
    assert torch.equal(y, torch.nn.functional.linear(x, layer.weight, layer.bias))
    assert scales(layer)["input"] == pytest.approx(448.0 / 3.3)
    assert scales(layer)["weight"] == pytest.approx(448.0 / layer.weight.abs().max().item())


def test_the_state_holds_on_to_no_graph() -> None:
    layer = make()
    step(layer).sum().backward()
    assert layer.state_dict(keep_vars=True)["fp8_amax_history_fwd"].grad_fn is None


# ---- micro-batches


def test_kept_weights_are_those_of_the_first_micro_batch() -> None:
    """True casts and keeps, False reuses whatever the weight has become, None casts anew; gradients accumulate."""
    layer, x = make(), torch.randn(8, 24)
    asked = recipe.Float8CurrentScaling()

    def forward(flag: bool | None) -> Tensor:
        with te.autocast(recipe=asked):
            return layer(x, is_first_microbatch=flag)

    first = forward(True)
    assert torch.equal(forward(None), first)
    with torch.no_grad():
        layer.weight.mul_(-2)
    again = forward(False)
    assert torch.equal(again, first)
    assert not torch.equal(forward(None), first)
    assert torch.equal(forward(False), first)
    first.sum().backward()
    once = layer.weight.grad.clone()
    again.sum().backward()
    assert torch.equal(layer.weight.grad, 2 * once)
    assert torch.equal(forward(True), forward(None))


def test_accumulation_with_kept_weights_is_accumulation_without() -> None:
    grads, states = [], []
    for flags in ((True, False, False), (None, None, None)):
        layer = make()
        for _ in range(3):
            for i, flag in enumerate(flags):
                x, dy = changing(i)
                with te.autocast(recipe=recipe.DelayedScaling(amax_history_len=8)):
                    y = layer(x, is_first_microbatch=flag)
                y.backward(dy)
        grads.append(layer.weight.grad)
        states.append(scales(layer))
    assert states[0]["input"] == states[1]["input"]
    assert states[0]["grad_output"] == states[1]["grad_output"]
    # The first micro-batch ever casts with scale 1, and those that reuse its weight keep that.
    assert (grads[0] - grads[1]).norm() <= 0.05 * grads[1].norm()


# ---- Transformer Engine itself


@pytest.mark.gpu
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_scales_are_transformer_engines(algorithm: str) -> None:
    pytorch = pytest.importorskip("transformer_engine.pytorch")
    common = pytest.importorskip("transformer_engine.common.recipe")
    torch.manual_seed(0)
    ours = te.Linear(32, 16, device="cuda")
    theirs = pytorch.Linear(32, 16, device="cuda")
    with torch.no_grad():
        theirs.weight.copy_(ours.weight)
        theirs.bias.copy_(ours.bias)
    options = {"margin": 0, "amax_history_len": 3, "amax_compute_algo": algorithm}
    mine, other = recipe.DelayedScaling(**options), common.DelayedScaling(**options)
    for i in range(20):
        generator = torch.Generator().manual_seed(i)
        x = (torch.randn(16, 32, generator=generator) * 2.0 ** (i % 5)).cuda()
        dy = (torch.randn(16, 16, generator=generator) * 1e-3).cuda()
        results = []
        for layer, context in (
            (ours, te.autocast(recipe=mine)),
            (theirs, pytorch.fp8_autocast(True, fp8_recipe=other)),
        ):
            leaf = x.clone().requires_grad_()
            layer.zero_grad()
            with context:
                y = layer(leaf)
            y.backward(dy)
            results.append((y, leaf.grad, layer.weight.grad))
        for mine_, their in zip(*results, strict=True):
            assert (mine_ - their).norm().item() <= 1e-3 * their.norm().item(), i
        meta = theirs.fp8_meta["scaling_fwd"]
        assert scales(ours)["input"] == meta.scale[0].item(), i
        assert scales(ours)["weight"] == meta.scale[1].item(), i
