"""What only the Triton AdamW has: what it launches again, captured graphs, speed; test_compiled.py has how it compiles."""

import statistics
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from adamw_checks import E4M3, E5M2, FORMS, assert_same, copy, few_bits, parameter, parameters, plain
from kernel_checks import captured, seconds
from launch_checks import Recorder
from torch import Tensor

from te_bench.kernels.adamw import Parameter
from te_bench.kernels.adamw.backends import reference, triton

BETAS = (0.9, 0.95)


def test_what_is_compiled_apart_has_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what differs in nothing is not compiled twice."""
    recorder = Recorder()
    monkeypatch.setattr(triton, "launch", recorder.launch)
    numbers = torch.ones(4)  # views of it are not aligned
    for layouts in ("", "b", "rt", "brt"):
        for target in (E4M3, E5M2):
            shapes = ((33, 70),) * (1 if target is E4M3 else 2)
            one = [parameter(shape, plain("cpu"), 0, layouts, target) for shape in shapes]
            made = triton.table(one)
            for betas in ((0.9, 0.95), (0.9, 0.99), (0.2, 0.95)):
                for multiplier in (None, numbers[0], numbers[1]):
                    for rate, eps in ((numbers[2], 1e-8), (numbers[0], 1.0)):
                        triton.step(made, rate=rate, step=numbers[3], betas=betas, eps=eps, multiplier=multiplier)
            triton.norm(made, 1)
            triton.norm(made, 2.0)
    for form in FORMS.values():
        made = triton.table([few_bits((64, 64), form), few_bits((3, 64), form), parameter((7,), plain("cpu"), 0)])
        for seed in torch.arange(2):
            triton.step(made, rate=numbers[0], step=numbers[3], betas=BETAS, eps=1e-8, seed=seed)
    steps = {compiled for compiled in recorder.call if compiled.startswith("step_kernel")}
    # By which end m is interpolated from; with and without a multiplier; no copy, bf16, and FP8 of two formats with it or
    # not. And forms in fewer bits.
    assert len(steps) == 2 * 2 * 6 + len(FORMS)
    assert all("'enable_fp_fusion': False" in compiled for compiled in steps)
    shared = {compiled for compiled in recorder.call if compiled.startswith("numbers_kernel")}
    assert len(shared) == 3  # betas
    norms = set(recorder.call) - steps - shared
    assert len(norms) <= 1 + 4  # squares_kernel, and norm_kernel by the number of partial sums


# A table whose parameters move


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter
def test_what_was_launched_with_a_table_follows_its_move() -> None:
    """A captured graph launches with the old table's tensors for ever."""
    ours = parameters(plain("cpu"))
    theirs, elsewhere = ([copy(p) for p in ours] for _ in range(2))
    old = triton.table(ours)
    moved = triton.move(old, elsewhere)
    assert moved.parameters == tuple(elsewhere)
    assert (moved.rows is old.rows, moved.tiles is old.tiles) == (True, True)
    number = {"rate": torch.tensor(2.0**-8), "step": torch.ones(()), "betas": BETAS, "eps": 1e-8}
    triton.step(old, **number)
    reference.step(reference.table(theirs), **number)
    for before, now, wanted in zip(ours, elsewhere, theirs, strict=True):
        assert_same(now, wanted)
        assert before.weight.numel() == 0 or not torch.equal(before.weight, now.weight)


def test_a_table_moves_to_its_own_like_only() -> None:
    old = triton.table([parameter((33, 70), plain("cpu"), 0, "b")])
    for shape, layouts in (((70, 33), "b"), ((33, 70), "bg"), ((33, 70), ""), ((33, 70), "brt")):
        with pytest.raises(ValueError, match="other shapes, dtypes or copies"):
            triton.move(old, [parameter(shape, plain("cpu"), 0, layouts)])
    with pytest.raises(ValueError, match="contiguous"):
        triton.move(old, [replace(parameter((33, 70), plain("cpu"), 0, "b"), grad=torch.ones(70, 33).t())])
    assert reference.BACKEND.move is None


# On a GPU


@pytest.mark.gpu
def test_a_captured_step_follows_its_inputs() -> None:
    """Clipping, the step's number, the rate, the gradients and the scales all change between replays."""
    ours, rate, count = parameters(plain("cuda")), torch.zeros((), device="cuda"), torch.zeros((), device="cuda")
    ours += [few_bits((34, 64), form, "rt", "cuda") for form in FORMS.values()]
    table, seed = triton.table(ours), torch.tensor(5, device="cuda")

    def call() -> None:
        count.add_(1)
        _, multiplier = triton.norm(table, 1.0)
        triton.step(table, rate=rate, step=count, betas=BETAS, eps=1e-8, multiplier=multiplier, seed=seed)

    graph = captured(call)  # at rate 0, but with moments
    theirs = [copy(p) for p in ours]
    plainly = reference.table(theirs)
    count.zero_()
    for t in range(1, 6):
        rate.fill_(2.0**-9 * t)
        for p, other in zip(ours, theirs, strict=True):
            p.grad.normal_()
            other.grad.copy_(p.grad)
            if p.scale is not None:
                p.scale.fill_(50.0 * t)
                other.scale.copy_(p.scale)
        _, multiplier = triton.norm(table, 1.0)
        graph.replay()
        step = torch.tensor(float(t), device="cuda")
        reference.step(plainly, rate=rate, step=step, betas=BETAS, eps=1e-8, multiplier=multiplier, seed=seed)
        for p, other in zip(ours, theirs, strict=True):
            assert_same(p, other)


@pytest.mark.gpu
@pytest.mark.slow
def test_more_elements_than_32_bits_count() -> None:
    n = 2**31 + 48
    weight, grad, m, v = (torch.zeros(n, device="cuda") for _ in range(4))
    grad[-50:] = 1.0
    table = triton.table([Parameter(weight=weight, grad=grad, exp_avg=m, exp_avg_sq=v)])
    one = torch.ones((), device="cuda")
    triton.step(table, rate=one, step=one, betas=BETAS, eps=1e-8)
    assert (weight[-50:] == -1).all()
    assert weight.count_nonzero() == 50
    norm, _ = triton.norm(table, 1.0)
    assert norm.item() == pytest.approx(50**0.5)


GPT2 = (
    (50304, 768), (1024, 768), *((768,), (768,), (2304, 768), (2304,), (768, 768), (768,), (768,), (768,), (3072, 768),
    (3072,), (768, 3072), (768,)) * 12, (768,), (768,),
)  # fmt: skip
BYTES = {"": 28, "b": 30, "rt": 30, "brt": 32}  # an element


def torchs(made: list[Parameter]) -> Callable[[], object]:
    weights: list[Tensor] = [p.weight.clone().requires_grad_() for p in made]
    for w, p in zip(weights, made, strict=True):
        w.grad = p.grad.clone()
    rate = torch.tensor(1e-4, device="cuda")
    return torch.optim.AdamW(weights, lr=rate, betas=BETAS, fused=True, capturable=True).step


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("layouts", BYTES)
def test_speed_on_gpt2(layouts: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Bytes a second against a copy's, time against torch's fused AdamW; the three by turns. Every matrix is cast."""
    made = []
    for i, shape in enumerate(GPT2):
        made.append(parameter(shape, plain("cuda"), i, layouts if len(shape) == 2 else layouts.strip("rt")))
    table, one = triton.table(made), torch.ones((), device="cuda")
    numel = sum(p.weight.numel() for p in made)
    source = torch.empty(numel * 3, device="cuda")
    target = torch.empty_like(source)
    calls: dict[str, Callable[[], object]] = {
        "copy": lambda: target.copy_(source),
        "ours": lambda: triton.step(table, rate=one, step=one, betas=BETAS, eps=1e-8, multiplier=one),
        "norm": lambda: triton.norm(table, 1.0),
        "torch": torchs(made),
    }
    rounds = [{name: seconds(call) for name, call in calls.items()} for _ in range(5)]
    took = {name: statistics.median(one_round[name] for one_round in rounds) for name in calls}
    copy_rate = 24 * numel / took["copy"]
    rate, norm_rate = BYTES[layouts] * numel / took["ours"], 4 * numel / took["norm"]
    with capsys.disabled():
        print(
            f"\nAdamW {layouts or 'plain':5s}: {took['ours'] * 1e6:.0f} us, {rate / 1e9:.0f} GB/s, {rate / copy_rate:.2f} "
            f"of a copy's {copy_rate / 1e9:.0f}; {took['torch'] / took['ours']:.2f} x torch's {took['torch'] * 1e6:.0f} us; "
            f"norm {took['norm'] * 1e6:.0f} us, {norm_rate / copy_rate:.2f} of a copy"
        )
    assert rate > 0.5 * copy_rate  # 0.85 is the aim
    assert took["ours"] < 1.1 * took["torch"] * BYTES[layouts] / 28
