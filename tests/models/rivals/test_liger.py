"""Liger's parts in the model, by a stand-in in plain PyTorch: the same loss and gradients under the same names."""

import sys
import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from passes import BIASED, NORMED, TINY, a_model, a_pass, errors
from torch import Tensor

from te_bench.kernels import linear_cross_entropy
from te_bench.models import rivals
from te_bench.models.configs import CONFIGS, LlamaConfig
from te_bench.models.rivals import liger
from te_bench.training.step import Optim, TrainStep


class GateUp(torch.autograd.Function):
    """As Liger's: the gradient, over the input and in two dimensions."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, in_place: bool) -> Tensor:
        assert in_place
        ctx.save_for_backward(y)
        gate, up = y.chunk(2, -1)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, dc: Tensor) -> tuple[Tensor, None]:
        (y,) = ctx.saved_tensors
        with torch.enable_grad():
            again = y.detach().requires_grad_()
            gate, up = again.chunk(2, -1)
            (dy,) = torch.autograd.grad(F.silu(gate) * up, again, dc)
        return y.copy_(dy).flatten(0, -2), None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """(B, H, T, D), (B, G, T, D), (T, D) twice: halves turn."""

    def turned(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return (x * cos + torch.cat((-second, first), -1) * sin).to(x.dtype)

    return turned(q), turned(k)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A stand-in of liger_kernel as far as it is called; the classes of the heads that it was given."""
    classes: list[int] = []

    def loss(x: Tensor, weight: Tensor, targets: Tensor, *, ignore_index: int, accum_dtype: torch.dtype) -> Tensor:
        assert accum_dtype is torch.float32
        classes.append(len(weight))
        return F.cross_entropy((x @ weight.t()).float(), targets, ignore_index=ignore_index)

    functional: Any = types.ModuleType("liger_kernel.transformers.functional")
    functional.liger_rms_norm, functional.liger_rope = rms_norm, rope
    functional.liger_fused_linear_cross_entropy = loss
    ops: Any = types.ModuleType("liger_kernel.ops")
    ops.LigerFusedGateUpSiLUMulFunction = GateUp
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, functional.__name__, functional)
    monkeypatch.setitem(sys.modules, ops.__name__, ops)
    return classes


@pytest.mark.parametrize("config", [TINY, NORMED, BIASED])
def test_loss_and_gradients_are_the_model_s(config: LlamaConfig, package: list[int]) -> None:
    options: dict[str, Any] = {"attention": "manual", "padded_vocab_size": 320}
    theirs, found = a_pass(a_model(config, "liger", **options))
    ours, wanted = a_pass(a_model(config, None, **options))
    assert theirs == pytest.approx(ours, rel=1e-6)
    assert max(errors(found, wanted).values()) < 1e-5
    assert package == [256]  # no padding
    assert not any(gradient[256:].any() for gradient in found.values() if len(gradient) == 320)


def test_its_head_trains_and_ours_evaluates(package: list[int]) -> None:
    model = a_model(TINY, "liger", attention="manual")
    trained, _ = a_pass(model)
    assert package
    package.clear()
    evaluated, _ = a_pass(model.eval())
    assert not package
    assert evaluated == pytest.approx(trained, rel=1e-6)


def test_a_step_of_it_trains(package: list[int]) -> None:
    step = TrainStep(
        a_model(TINY, "liger", attention="manual"), Optim(learning_rate=1e-2), precision="bf16", mode="eager"
    )
    tokens, targets = torch.randint(0, 256, (2, 2, 32))
    losses = [step(tokens, targets).item() for _ in range(4)]
    assert losses == sorted(losses, reverse=True)
    assert len(package) == 4


def test_the_products_of_its_head_are_counted_by_its_rule_of_chunks() -> None:
    """63 times as many classes as features: 131 rows, made 256."""
    head = liger.head(CONFIGS["llama3-1b"])
    assert head.gemms(8192, 2048, 128256, 2, False) == (0, 3 * 32)
    assert head.gemms(100, 2048, 128256, 2, False) == (0, 3 * 50)
    assert liger.head(TINY).gemms(64, 32, 256, 2, False) == (0, 3 * 4)


def test_where_it_cannot_run_it_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    unsupported = rivals.load("liger").unsupported
    with monkeypatch.context() as there:
        there.setattr(liger, "missing", lambda *_: None)
        assert all(unsupported(config, "cuda", (9, 0)) is None for config in (TINY, NORMED, BIASED))
        assert unsupported(TINY, "cpu", None) == "needs an NVIDIA GPU"
        assert unsupported(CONFIGS["tiny"], "cuda", (9, 0)) == "its norms are no plain RMSNorm"
    with monkeypatch.context() as missing:
        missing.setattr("importlib.util.find_spec", lambda package: None)
        assert unsupported(TINY, "cuda", (9, 0)) == "needs liger-kernel: pip install liger-kernel"


def test_its_head_alone_is_a_backend_of_linear_cross_entropy(package: list[int]) -> None:
    """Gradients to both operands, of the true vocabulary alone."""
    x, weight = torch.randn(24, 16, requires_grad=True), torch.randn(64, 16, requires_grad=True)
    targets = torch.randint(0, 50, (24,))
    found, wanted = (
        torch.autograd.grad(linear_cross_entropy.load(name).forward(x, weight, targets, vocab=50), (x, weight))
        for name in ("liger", "reference")
    )
    torch.testing.assert_close(found, wanted)
    assert package == [50]
