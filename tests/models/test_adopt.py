"""A user's own module in a TrainStep."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from te_bench.models import adopted, recipe
from te_bench.models.adopt import adopt
from te_bench.training.step import CannotCapture, Optim, TrainStep

TOKENS = torch.randint(96, (4, 17), generator=torch.Generator().manual_seed(0))
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Language(nn.Module):
    """Logits of the next token; waits: for the device."""

    def __init__(self, waits: bool = False):
        super().__init__()
        self.embedding, self.inner, self.head = nn.Embedding(96, 64), nn.Linear(64, 64), nn.Linear(64, 96)
        self.waits = waits

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = F.gelu(self.inner(self.embedding(tokens)))
        if self.waits and hidden.abs().sum().item() < 0:
            raise AssertionError
        logits: Tensor = self.head(hidden)
        return logits


def llama() -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=96, num_key_value_heads=2, **sizes))


def losses(step: TrainStep, device: str) -> list[float]:
    inputs, targets = TOKENS[:, :-1].to(device), TOKENS[:, 1:].to(device)
    return [step(inputs, targets).item() for _ in range(6)]


def test_a_filter_leaves_the_head_out_of_fp8() -> None:
    def adopted_with(**options: Any) -> adopted.Adopted:
        e4m3 = recipe.DelayedScaling(fp8_format=recipe.Format.E4M3)
        return adopt(llama(), recipe=e4m3, parts="all", **options)

    with_head, without = adopted_with(), adopted_with(filter=lambda name, module: name != "lm_head")
    assert with_head.converted.keys() - without.converted.keys() == {"module.lm_head"}
    assert without.fp8_heads == []
    with pytest.raises(ValueError, match="filter is only for"):
        adopt(llama(), filter=lambda name, module: False)
    with pytest.raises(ValueError, match="'lm_head' is no function"):
        adopted_with(filter="lm_head")
    with pytest.raises(ValueError, match="leaves no layer"):
        adopted_with(filter=lambda name, module: name == "lm_haed")


@pytest.mark.parametrize("make", [Language, llama])
def test_a_step_of_it_is_its_own_loss_and_torchs_adamw(make: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    module = make()
    twin = copy.deepcopy(module)
    found = losses(TrainStep(adopt(module), Optim(grad_clip=0.0), precision="fp32", mode="eager"), "cpu")
    optim = Optim()
    rates: dict[str, Any] = {"lr": optim.learning_rate, "betas": (optim.beta1, optim.beta2)}
    matrices = [p for p in twin.parameters() if p.dim() >= 2]
    others = [p for p in twin.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": optim.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, **rates)
    wanted = []
    for _ in range(6):
        out = twin(TOKENS[:, :-1])
        logits = out if isinstance(out, Tensor) else out.logits
        loss = F.cross_entropy(logits.flatten(0, 1), TOKENS[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        wanted.append(loss.item())
    assert found == pytest.approx(wanted, rel=1e-5)
    assert wanted[-1] < wanted[0]


@pytest.mark.parametrize("pinned", [(), ("math", "cudnn")])
def test_the_users_choice_of_attention_kernels_stays(pinned: tuple[str, ...]) -> None:
    adopted.pin(adopted.OWN)
    torch.backends.cuda.enable_flash_sdp(False)
    try:
        for kernel in pinned:  # as a model of te-bench's suites does
            adopted.pin(kernel)
            assert torch.backends.cuda.math_sdp_enabled() is (kernel == "math")
        step = TrainStep(adopt(Language()), Optim(), precision="fp32", mode="eager")
        losses(step, "cpu")
        assert not torch.backends.cuda.flash_sdp_enabled()
        assert torch.backends.cuda.math_sdp_enabled()
        assert torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        adopted.pin(adopted.OWN)
        torch.backends.cuda.enable_flash_sdp(True)


@pytest.mark.parametrize("device", DEVICES)
def test_in_fp8_with_all_parts_it_learns_as_in_float32(device: str) -> None:
    torch.manual_seed(0)
    module = llama().to(device)
    plain = TrainStep(adopt(copy.deepcopy(module)), Optim(), precision="fp32", mode="eager")
    model = adopt(module, recipe=recipe.Float8CurrentScaling(), parts="all")
    found = losses(TrainStep(model, Optim(), precision="fp8", mode="eager"), device)
    assert found == pytest.approx(losses(plain, device), rel=0.02)


def test_a_masked_models_targets_are_its_labels() -> None:
    """te-bench hides no token of a user's batch, as its own trials do."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
    module = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=96, **sizes)).eval()
    labels = TOKENS.where(TOKENS % 7 == 0, -100)
    wanted = module(input_ids=TOKENS, labels=labels).loss
    for parts in (None, "all"):
        model = adopt(copy.deepcopy(module), parts=parts)
        torch.testing.assert_close(model(TOKENS, labels), wanted, rtol=1e-5, atol=1e-6)


def test_a_loss_of_ones_own() -> None:
    model = adopt(nn.Linear(8, 3), loss=lambda out, wanted: F.mse_loss(out, wanted))
    x, y = torch.randn(2, 8), torch.randn(2, 3)
    assert model(x, y) == F.mse_loss(model.module(x), y)


def test_what_is_no_loss_is_refused() -> None:
    model = adopt(nn.Linear(8, 3))
    with pytest.raises(ValueError, match="Linear: its forward returned a tensor"):
        model(torch.randn(2, 8), torch.randn(2, 3))


@pytest.mark.parametrize("module", [3, Language, Language().requires_grad_(False), nn.GELU()])
def test_what_has_nothing_to_train_is_refused(module: Any) -> None:
    with pytest.raises(ValueError, match=r"it is no nn\.Module with weights that are trained"):
        adopt(module)


@pytest.mark.parametrize(
    ("asked", "message"),
    [({"recipe": "delayed_scaling"}, "'delayed_scaling' is no recipe"), ({"loss": "mse"}, "loss 'mse' is no function")],
)
def test_what_is_no_recipe_and_no_loss_is_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        adopt(Language(), **asked)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"precision": "fp8", "mode": "eager"}, "precision fp8: the model has no recipe"),
        ({"precision": "bf17", "mode": "eager"}, "unknown precision 'bf17'. Did you mean bf16"),
        ({"precision": "bf16", "mode": "compiled"}, "unknown mode 'compiled'. Did you mean compile"),
    ],
)
def test_what_a_step_cannot_be_is_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainStep(adopt(Language()), Optim(), **asked)


def test_a_batch_that_is_a_dict_is_refused() -> None:
    step = TrainStep(adopt(Language(), parts="all"), Optim(), precision="bf16", mode="eager")
    with pytest.raises(ValueError, match="a step takes two tensors, inputs and targets, and got dict and Tensor"):
        step({"tokens": TOKENS[:, :-1]}, TOKENS[:, 1:])  # type: ignore[arg-type]


@pytest.mark.gpu
def test_a_captured_step_takes_no_other_shape() -> None:
    step = TrainStep(adopt(Language().to("cuda"), parts="all"), Optim(), precision="bf16", mode="cudagraph")
    losses(step, "cuda")
    with pytest.raises(ValueError, match=r"of a batch \(4, 16\), and this one is \(1, 16\)"):
        step(TOKENS[:1, :-1].cuda(), TOKENS[:1, 1:].cuda())


@pytest.mark.gpu
@pytest.mark.parametrize("chosen", [None, recipe.DelayedScaling(), recipe.Float8CurrentScaling()])
def test_one_graph_trains_as_eager_does(chosen: recipe.Recipe | None) -> None:
    torch.manual_seed(0)
    module = llama().to("cuda")
    precision = "bf16" if chosen is None else "fp8"
    found = {}
    for mode in ("eager", "cudagraph"):
        model = adopt(copy.deepcopy(module), recipe=copy.deepcopy(chosen), parts="all")
        found[mode] = losses(TrainStep(model, Optim(), precision=precision, mode=mode), "cuda")
    assert found["cudagraph"] == pytest.approx(found["eager"], rel=0.02 if chosen else 2e-3)
    assert found["cudagraph"][-1] < found["cudagraph"][0]


@pytest.mark.gpu
def test_a_model_that_waits_for_the_gpu_cannot_be_captured() -> None:
    model = adopt(Language(waits=True).to("cuda"), parts="all")
    with pytest.raises(CannotCapture, match="waits for the GPU"):
        losses(TrainStep(model, Optim(), precision="bf16", mode="cudagraph"), "cuda")
    assert torch.rand(8, device="cuda").unique().numel() == 8  # random numbers are there again
