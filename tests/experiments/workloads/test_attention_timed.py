"""The attention workloads: timed with their check, and the appendix's numerics."""

import dataclasses
import functools
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import planting
import pytest
import torch

from te_bench.experiments import timing
from te_bench.experiments.instruments import energy, profiling
from te_bench.experiments.measurement import CheckFailed, Context, Unsupported
from te_bench.experiments.spec import Trial
from te_bench.experiments.workloads import attention, attention_numerics
from te_bench.kernels import attention as kernels
from te_bench.kernels import measured
from te_bench.kernels.attention.backends import auto

SHAPE = {"batch": 2, "heads": 2, "length": 16, "head_dim": 8, "causal": True}
TRIAL = Trial(workload="attention", device="cpu", problem=SHAPE, attention="flash", precision="fp32", protocol="kernel")


LEAST = timing.KERNEL_MIN  # of a user's

pytestmark = pytest.mark.usefixtures("brief")


def test_forward_and_backward_are_timed_apart_and_their_work_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "KERNEL_MIN", LEAST)
    found = attention.run(TRIAL, Context())
    assert {name: len(values) for name, values in found.samples.items() if len(values) < 30} == {"peak_rss_bytes": 1}
    assert set(found.samples) == {"forward_s", "backward_s", "peak_rss_bytes"}
    assert found.samples["peak_rss_bytes"][0] > 2**20
    assert found.work == {"forward_flop": 4 * 2 * 2 * 16**2 * 8 // 2, "backward_flop": 5 * 2 * 2 * 16**2 * 8}
    names = "out", "dq", "dk", "dv"
    assert [q["name"] for q in found.check["quantities"]] == [*names, *(f"{name}, scale" for name in names)]
    full = attention.run(dataclasses.replace(TRIAL, problem={**SHAPE, "causal": False}), Context())
    assert full.work["forward_flop"] == 2 * found.work["forward_flop"]


def test_attention_of_many_operators_is_timed_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its backward pass goes over one graph again and again."""
    monkeypatch.setattr(timing, "KERNEL_MIN", LEAST)
    trial = dataclasses.replace(TRIAL, attention="manual", mode="compile", precision="bf16")
    found = attention.run(trial, Context())
    assert len(found.samples["backward_s"]) >= 30
    assert found.work["graph_breaks"] == 0


def by(name: str, head_dim: int, **said: Any) -> Callable[..., Any]:
    return functools.partial(kernels.load(name).forward, causal=True, scale=head_dim**-0.5, **said)


def replaced(monkeypatch: pytest.MonkeyPatch, change: Callable[..., Any]) -> None:
    """flash's forward becomes change(its forward); manual, the reference, stays."""
    real = kernels.load
    wrong = dataclasses.replace(real("flash"), forward=change(real("flash").forward))
    monkeypatch.setattr(kernels, "load", lambda name: wrong if name == "flash" else real(name))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["math", "flash"])
@pytest.mark.parametrize("length", [16, 128])
def test_right_kernels_pass_on_every_seed(name: str, precision: str, length: int) -> None:
    shape = {**SHAPE, "length": length, "head_dim": 32, "heads": 4}
    for seed in range(20):
        trial = dataclasses.replace(TRIAL, attention=name, precision=precision, problem=shape, seed=seed)
        attention.check_attention(trial, by(name, 32))


def test_a_backend_in_fp8_is_held_to_the_definition_in_fp8() -> None:
    """It errs far more than manual attention at its dtype; at twice its scale it errs too much for FP8 too."""
    trial = dataclasses.replace(TRIAL, attention="manual_fp8", problem={**SHAPE, "length": 64, "head_dim": 32})
    forward = by("manual_fp8", 32)
    found = attention.check_attention(trial, forward)
    assert all(1e-3 < q["error"] < q["limit"] for q in found["quantities"][:4])
    in_fp32 = dataclasses.replace(trial, attention="flash")
    with pytest.raises(CheckFailed):
        attention.check_attention(in_fp32, forward)
    with pytest.raises(CheckFailed):
        attention.check_attention(trial, lambda q, k, v: forward(2 * q, k, v))


@pytest.mark.parametrize(
    "change",
    [
        lambda f: lambda q, k, v, **o: -f(q, k, v, **o),
        lambda f: lambda q, k, v, **o: 0 * f(q, k, v, **o),
        lambda f: lambda q, k, v, **o: 1.01 * f(q, k, v, **o),
        lambda f: lambda q, k, v, *, causal, scale: f(q, k, v, causal=causal, scale=2 * scale),
        lambda f: lambda q, k, v, *, causal, scale: f(q, k, v, causal=not causal, scale=scale),
        lambda f: lambda q, k, v, **o: f(q, k, v.detach(), **o) + 0 * v,
        lambda f: lambda q, k, v, **o: f(q, k, v, **o) * float("nan"),
    ],
    ids=["sign", "zero", "a hundredth too large", "scale", "mask", "no gradient of v", "NaN"],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_wrong_kernel_is_not_timed(monkeypatch, change, precision):
    replaced(monkeypatch, change)
    with pytest.raises(CheckFailed, match=r"error .* > ") as caught:
        attention.run(dataclasses.replace(TRIAL, precision=precision), Context())
    assert caught.value.measurement.samples == {}


@pytest.mark.parametrize(("seed", "reason"), [(lambda _: 0, "do not depend on"), (lambda s: s + 1, "are not those of")])
def test_inputs_of_another_seed_than_the_trials_fail(monkeypatch: pytest.MonkeyPatch, seed: Any, reason: str) -> None:
    right, given = attention.inputs, list[int]()

    def wrong(trial: Trial, *sizes: int) -> Any:
        given.append(trial.seed)
        of_check = reason.startswith("are not") and len(given) != 2  # the second call draws what is timed
        return right(trial if of_check else dataclasses.replace(trial, seed=seed(trial.seed)), *sizes)

    monkeypatch.setattr(attention, "inputs", wrong)
    with pytest.raises(CheckFailed, match=f"^the inputs {reason} the seed 3$"):
        attention.run(dataclasses.replace(TRIAL, seed=3), Context())


def test_another_kernel_than_the_one_asked_for_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    math = kernels.load("math").forward
    replaced(monkeypatch, lambda f: math)
    for workload in (attention, attention_numerics):
        with pytest.raises(CheckFailed, match="asked for flash, but"):
            workload.run(TRIAL, Context())


def test_what_the_backend_cannot_do_is_unsupported() -> None:
    for workload in (attention, attention_numerics):
        with pytest.raises(Unsupported, match="cudnn: needs an NVIDIA GPU"):
            workload.run(dataclasses.replace(TRIAL, attention="cudnn"), Context())


@pytest.mark.parametrize(
    ("changes", "pairs"),
    [
        ({"window_left": 3, "window_right": 0, "causal": False}, 4 * 16 - 6),
        ({"window_left": 3, "window_right": 2, "causal": True}, 4 * 16 - 6),
        ({"window_left": -1, "window_right": 1, "causal": False}, 16 * 17 // 2 + 15),
        ({"kv_heads": 1}, 16 * 16 // 2),
    ],
)
@pytest.mark.parametrize("name", ["flash", "manual", "auto"])
def test_windows_and_shared_heads_are_checked_and_their_work_is_counted(name, changes, pairs):
    found = attention.run(dataclasses.replace(TRIAL, attention=name, problem={**SHAPE, **changes}), Context())
    assert found.work["forward_flop"] == 4 * 2 * 2 * 8 * pairs


def test_a_window_that_is_ignored_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    replaced(monkeypatch, lambda f: lambda q, k, v, *, mask, **o: f(q, k, v, **{**o, "causal": True}))
    shape = {**SHAPE, "causal": False, "window_left": 3, "window_right": 0}
    with pytest.raises(CheckFailed, match=r"error .* > "):
        attention.run(dataclasses.replace(TRIAL, problem=shape), Context())


def window_one_wider(patch: pytest.MonkeyPatch) -> None:
    right = kernels.attend

    def attend(*given: Any, window: Any, **said: Any) -> Any:
        return right(*given, window=(window[0] + 1, window[1]), **said)

    patch.setattr(kernels, "attend", attend)


def borders_one_late(patch: pytest.MonkeyPatch) -> None:
    right, late = attention.attend_packed, torch.tensor([0, 1, 1, 1, 1, 1, 1, 1, 0]).int()

    def attend(backend: kernels.Backend, q: Any, k: Any, v: Any, *starts: Any, **said: Any) -> Any:
        *borders, longest = starts
        return right(backend, q, k, v, *(each + late for each in borders), longest, **said)

    patch.setattr(attention, "attend_packed", attend)


@pytest.mark.parametrize(
    ("fault", "changes"),
    [(window_one_wider, {"causal": False, "window_left": 3, "window_right": 0}), (borders_one_late, {"documents": 4})],
    ids=["window", "documents"],
)
@pytest.mark.parametrize("name", ["flash", "manual"])
def test_masks_that_are_wrong_for_every_backend_are_not_timed(name, fault, changes, monkeypatch):
    """The yardstick and the exact result are by none of the code that backends share."""
    fault(monkeypatch)
    with pytest.raises(CheckFailed, match=r"error .* > "):
        attention.run(dataclasses.replace(TRIAL, attention=name, problem={**SHAPE, **changes}), Context())


class _GradientsOfZero(torch.autograd.Function):
    """The identity, which passes back no gradient while `now()`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, now: Callable[[], bool]) -> torch.Tensor:
        ctx.now = now
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dx: torch.Tensor) -> Any:  # type: ignore[override]
        return dx * (not ctx.now()), None


TIMED_WRONGLY = [
    lambda f, now: lambda *x, **o: 0 * f(*x, **o) if now() else f(*x, **o),
    lambda f, now: lambda *x, **o: _GradientsOfZero.apply(f(*x, **o), now),
]


@pytest.mark.parametrize("changes", [{}, {"kv_heads": 1}, {"documents": 4}], ids=str)
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("change", TIMED_WRONGLY, ids=["forward", "backward"])
def test_attention_that_is_wrong_only_when_timed_fails(change, whole, changes, monkeypatch):
    """Of a large one a single head is held to float64: of heads that share a key, without its gradient."""
    monkeypatch.setattr(attention, "CHECK_SCORES", 2**26 if whole else 1)
    trial = dataclasses.replace(TRIAL, problem={**SHAPE, **changes})
    attention.run(trial, Context())
    now = planting.only_timed(monkeypatch, "kernel")
    replaced(monkeypatch, lambda f: change(f, now))
    with pytest.raises(CheckFailed, match="^out" if change is TIMED_WRONGLY[0] else "^d[qkv]"):
        attention.run(trial, Context())


def test_what_is_looked_at_is_what_was_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right, x = profiling.kernels_seen, torch.ones(1, 1, 4, 8)
    other = functools.partial(torch.nn.functional.scaled_dot_product_attention, x, x, x)
    monkeypatch.setattr(profiling, "kernels_seen", lambda call, device: right(other, device))
    with pytest.raises(CheckFailed, match="not of the call that was timed"):
        attention.run(TRIAL, Context())


DOCUMENTS = {**SHAPE, "documents": 4}  # of 8, 4, 2 and 2 tokens
DROPOUT = {**SHAPE, "length": 32, "dropout": 0.2}


@pytest.mark.parametrize(
    ("changes", "pairs"),
    [
        ({}, (8**2 + 4**2 + 2**2 + 2**2) // 2),
        ({"causal": False}, 8**2 + 4**2 + 2**2 + 2**2),
        ({"kv_heads": 1, "window_left": 3, "window_right": 0}, (4 * 8 - 6) + (4 * 4 - 6) + 3 + 3),
        ({"length": 13, "documents": 2}, 7**2 // 2 + 6**2 // 2),
    ],
)
@pytest.mark.parametrize("name", ["flash", "manual", "auto"])
def test_documents_are_checked_and_their_own_work_is_counted(name: str, changes: dict[str, Any], pairs: int) -> None:
    found = attention.run(dataclasses.replace(TRIAL, attention=name, problem={**DOCUMENTS, **changes}), Context())
    assert found.work["forward_flop"] == 4 * 2 * 2 * 8 * pairs
    assert found.work["backward_flop"] == 10 * 2 * 2 * 8 * pairs


def test_documents_that_see_each_other_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = kernels.load

    def joined(q: Any, k: Any, v: Any, *_: Any, causal: bool, scale: float, **__: Any) -> Any:
        rows = (x.transpose(0, 1)[None] for x in (q, k, v))
        return real("flash").forward(*rows, causal=causal, scale=scale)[0].transpose(0, 1)

    wrong = dataclasses.replace(real("flash"), packed=joined)
    monkeypatch.setattr(kernels, "load", lambda name: wrong if name == "flash" else real(name))
    with pytest.raises(CheckFailed, match=r"error .* > "):
        attention.run(dataclasses.replace(TRIAL, problem=DOCUMENTS), Context())


@pytest.mark.parametrize("name", ["math", "manual", "auto"])
def test_dropout_is_checked_and_counts_as_no_work(name: str) -> None:
    found = attention.run(dataclasses.replace(TRIAL, attention=name, problem=DROPOUT), Context())
    assert found.work["forward_flop"] == 4 * 2 * 2 * 32**2 * 8 // 2
    assert "kept share" in {q["name"] for q in found.check["quantities"]}
    with pytest.raises(Unsupported, match="dropout"):
        attention.run(dataclasses.replace(TRIAL, problem=DROPOUT), Context())


@pytest.mark.parametrize("changes", [{}, {"kv_heads": 1}, {"documents": 3}])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_dropout_of_our_kernels_passes_its_check(precision: str, changes: dict[str, Any], monkeypatch: Any) -> None:
    problem = {**DROPOUT, **changes, "batch": 1, "head_dim": 16}
    trial = dataclasses.replace(TRIAL, attention="triton", precision=precision, problem=problem)
    monkeypatch.setattr(timing, "kernel", planting.once)
    check = attention.run(trial, Context()).check
    assert "kept share" in {q["name"] for q in check["quantities"]}


def by_math(dropout: float) -> Callable[..., Any]:
    return by("math", 8, dropout=dropout)


def gradients_of_other_weights(q: Any, k: Any, v: Any) -> Any:
    out = by_math(0.2)(q, k, v).detach()
    other = by_math(0.2)(q, k, v)  # the generator has gone on
    return out + other - other.detach()


@pytest.mark.parametrize(
    ("forward", "quantity"),
    [
        (by_math(0.0), "kept share"),
        (lambda *x: by_math(0.5)(*x) * (0.5 / 0.8), "kept share"),
        (lambda *x: by_math(0.2)(*x) * 0.8, "out"),
        (gradients_of_other_weights, "dq"),
    ],
    ids=["none", "too much of it", "weights that are not made up for", "others in the backward pass"],
)
def test_wrong_dropout_fails(forward: Callable[..., Any], quantity: str) -> None:
    trial = dataclasses.replace(TRIAL, attention="math", problem=DROPOUT)
    attention.check_attention(trial, by_math(0.2))
    with pytest.raises(CheckFailed) as caught:
        attention.check_attention(trial, forward)
    wrong = {q["name"] for q in caught.value.measurement.check["quantities"] if not q["error"] <= q["limit"]}
    assert quantity in wrong


def test_energy_of_both_passes_is_recorded_where_it_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[float] = []

    def of_steps(step: Callable[[], object], device: str, seconds: float) -> float:
        passed.clear()
        step()
        counted.append(seconds)
        return 0.25

    passed: list[int] = []
    real = torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda *a, **o: (passed.append(1), real(*a, **o))[1])
    monkeypatch.setattr(energy, "of_steps", of_steps)
    found = attention.run(TRIAL, Context())
    assert found.samples["energy_j"] == [0.25]
    assert passed == [1]
    medians = [statistics.median(found.samples[name]) for name in ("forward_s", "backward_s")]
    assert counted == [pytest.approx(sum(medians))]
    assert "energy_j" not in attention.run(TRIAL, Context(check=False)).samples


@pytest.mark.gpu
@pytest.mark.parametrize("changes", [{}, {"window_left": 127, "window_right": 0}, {"documents": 4}, {"dropout": 0.1}])
@pytest.mark.parametrize("name", ["triton", "cudnn", "flash", "mem_efficient", "auto"])
def test_on_a_gpu_what_can_passes_and_joules_are_counted(
    name: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(energy, "WINDOW_S", 1.0)
    shape = {"batch": 2, "heads": 8, "kv_heads": 2, "length": 256, "head_dim": 64, "causal": True, **changes}
    trial = dataclasses.replace(TRIAL, device="cuda", attention=name, precision="bf16", problem=shape)
    if name in ("cudnn", "flash") and not changes.keys() <= {"dropout"}:
        with pytest.raises(Unsupported, match=r"mask|window"):
            attention.run(trial, Context())
        return
    assert 0 < attention.run(trial, Context()).samples["energy_j"][0] < 1


@pytest.fixture
def anew() -> Iterator[None]:
    measured.forget()
    yield
    measured.forget()


@pytest.mark.usefixtures("anew")
def test_auto_says_what_it_chose_and_that_is_what_is_checked_and_what_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = dataclasses.replace(TRIAL, attention="auto")
    for name in ("math", "flash"):
        monkeypatch.setattr(auto, "preference", lambda problem, name=name: (name,))
        measured.forget()
        assert attention.run(trial, Context()).work["chosen"] == name
        assert auto.chosen() == (name,)
    assert "chosen" not in attention.run(TRIAL, Context()).work
    # It says flash, and runs math.
    monkeypatch.setattr(auto, "_backends", {"flash": kernels.load("math")})
    monkeypatch.setattr(auto, "load", lambda name: kernels.load("math"))
    measured.forget()
    with pytest.raises(CheckFailed, match="asked for auto, which chose flash, but"):
        attention.run(trial, Context())


@pytest.mark.usefixtures("anew")
def test_autos_backend_is_checked_at_the_size_of_the_check_whatever_auto_would_take_there(monkeypatch):
    monkeypatch.setattr(attention, "CHECK_SCORES", 16 * 16)  # one head of one sequence
    monkeypatch.setattr(auto, "preference", lambda problem: ("math",) if problem.batch == 1 else ("flash",))
    ran: list[tuple[str, int]] = []
    real = kernels.load

    def spied(name: str) -> kernels.Backend:
        def forward(q: Any, *tensors: Any, **options: Any) -> Any:
            ran.append((name, len(q)))
            return real(name).forward(q, *tensors, **options)

        return real(name) if name == "auto" else dataclasses.replace(real(name), forward=forward)

    monkeypatch.setattr(kernels, "load", spied)
    attention.run(dataclasses.replace(TRIAL, attention="auto"), Context())
    assert {name for name, batch in ran if batch == 1} == {"flash"}


def test_numerics_has_one_error_of_each_kind_a_draw_and_they_are_small() -> None:
    found = attention_numerics.run(dataclasses.replace(TRIAL, precision="bf16"), Context())
    assert set(found.samples) == {"error_scale_before", "error_scale_after", "error_sdpa"}
    for errors in found.samples.values():
        assert len(errors) == attention_numerics.DRAWS == len(set(errors))
        assert all(0 < error < 0.05 for error in errors)
    assert found.check["draws"] == attention_numerics.DRAWS
    fp32 = attention_numerics.run(TRIAL, Context())
    assert fp32.check["allclose"] == (fp32.check["allclose_draws"] == attention_numerics.DRAWS)
    assert max(fp32.samples["error_sdpa"]) < 1e-5


def test_numerics_draws_differ_between_seeds() -> None:
    found = (attention_numerics.run(dataclasses.replace(TRIAL, seed=seed), Context()) for seed in (0, 1))
    first, second = (set(one.samples["error_sdpa"]) for one in found)
    assert not first & second
