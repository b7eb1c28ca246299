"""Mode compile-blocks: each transformer block under torch.compile, and all around the blocks in eager mode."""

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from te_bench.experiments.instruments import profiling
from te_bench.kernels import attention
from te_bench.models import decoder, recipe
from te_bench.models.adopt import adopt
from te_bench.models.checkpointing import checkpoint_blocks
from te_bench.training.parallel import Parallel
from te_bench.training.step import Optim, TrainStep

LAYERS, STEPS = 4, 4  # more layers than the recompile_limit of `dynamo`
TOKENS = torch.arange(64).reshape(2, 32) * 7919 % 96


@pytest.fixture
def dynamo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch.compile without Inductor; a block that it would compile too often raises."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=2, fail_on_recompile_limit_hit=True):
        yield
    torch._dynamo.reset()


def llama(layers: int = LAYERS, **sizes: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    given: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 96}
    given |= {"num_key_value_heads": 1, "num_hidden_layers": layers, **sizes}
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**given))


def a_step(mode: str, **how: Any) -> TrainStep:
    adopted = adopt(llama(), recipe=how.pop("recipe", None))
    return TrainStep(adopted, Optim(learning_rate=1e-3), **{"precision": "bf16", "mode": mode, **how})


def losses(step: TrainStep, tokens: Tensor = TOKENS) -> list[float]:
    return [step(tokens, tokens.roll(-1, 1)).item() for _ in range(STEPS)]


def regions(step: TrainStep) -> int:
    """How many compiled pieces a step runs."""
    seen = profiling.kernels_seen(lambda: step(TOKENS, TOKENS), "cpu")
    return sum(times for name, times in seen.counts.items() if name.startswith("Torch-Compiled Region"))


@pytest.mark.slow
def test_it_trains_as_eager_mode_does_by_inductors_code() -> None:
    torch._dynamo.reset()
    eager = losses(a_step("eager"))
    assert losses(a_step("compile-blocks")) == pytest.approx(eager, rel=2e-3)
    assert eager[-1] < eager[0] - 0.01


@pytest.mark.usefixtures("dynamo")
def test_alike_blocks_share_their_code_and_all_else_is_eager() -> None:
    step = a_step("compile-blocks")
    names = [name for name, _ in step.model.named_parameters()]
    assert losses(step) == losses(a_step("eager"))
    assert regions(step) == LAYERS
    assert [name for name, _ in step.model.named_parameters()] == names


@pytest.mark.usefixtures("dynamo")
def test_another_step_of_the_same_model_and_the_model_itself_stay_eager() -> None:
    step = a_step("compile-blocks")
    other = TrainStep(step.model, Optim(learning_rate=0.0), precision="bf16", mode="eager")
    assert (regions(step), regions(other), regions(step)) == (LAYERS, 0, LAYERS)
    seen = profiling.kernels_seen(lambda: step.model(TOKENS, TOKENS), "cpu")
    assert not any("Compiled" in name for name in seen.counts)


@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize(
    "name",
    [
        None,
        pytest.param("delayed_scaling", marks=pytest.mark.slow),
        pytest.param("float8_current_scaling", marks=pytest.mark.slow),
    ],
)
def test_checkpointed_blocks_and_blocks_in_fp8_are_compiled_once_for_all(name: str | None) -> None:
    found = []
    for mode, again in (("eager", False), ("compile-blocks", False), ("compile-blocks", True)):
        torch._dynamo.reset()
        step = a_step(mode, **({"recipe": recipe.load(name), "precision": "fp8"} if name else {}))
        if again:
            checkpoint_blocks(step.model)
        found.append(losses(step))
        assert regions(step) == (0 if mode == "eager" else LAYERS)
    assert found[1:] == found[:1] * 2


class Padded(nn.Module):
    """Called as a tokenizer's batch asks for it: with an attention mask, of ones here."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        how = {"attention_mask": torch.ones_like(tokens), "use_cache": False}
        loss: Tensor = self.model(tokens, labels=targets, **how).loss
        return loss


@pytest.mark.usefixtures("dynamo")
def test_transformers_leaves_its_mask_out_as_in_eager_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torch.compile of the whole model it cannot read the padding, and gives every attention a mask."""
    right, given = F.scaled_dot_product_attention, list[tuple[bool, bool]]()

    def seen(*qkv: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, **how: Any) -> Tensor:
        given.append((attn_mask is None, is_causal))
        return right(*qkv, attn_mask=attn_mask, is_causal=is_causal, **how)

    monkeypatch.setattr(F, "scaled_dot_product_attention", seen)
    causal, masked = (True, True), (False, False)
    for mode, expected in (("eager", causal), ("compile-blocks", causal), ("compile", masked)):
        given.clear()
        TrainStep(Padded(llama(2)), Optim(), precision="bf16", mode=mode)(TOKENS, TOKENS)
        assert set(given) == {expected}, mode


@pytest.mark.parametrize(
    ("model", "how", "reason"),
    [
        (lambda: nn.Linear(4, 4), {}, "mode compile-blocks: Linear has no nn.ModuleList of blocks"),
        (lambda: adopt(llama(2), parts="all"), {}, "mode compile-blocks: fused kernels compute these blocks"),
        (lambda: decoder.load("tiny", blocks="fused"), {}, "mode compile-blocks: fused kernels compute these blocks"),
        (lambda: decoder.load("tiny"), {"parallel": Parallel()}, "blocks are compiled one by one in a single process"),
    ],
)
def test_what_has_no_blocks_to_compile_is_refused_with_the_reason(model: Any, how: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        TrainStep(model(), Optim(), precision="bf16", mode="compile-blocks", **how)


@pytest.mark.gpu
def test_on_a_gpu_attention_keeps_its_fast_kernel_and_the_step_its_losses() -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8}
    tokens = torch.arange(1024, device="cuda").reshape(2, 512) * 7919 % 96
    eager, step = (
        TrainStep(Padded(llama(2, **sizes)).cuda(), Optim(learning_rate=1e-3), precision="bf16", mode=mode)
        for mode in ("eager", "compile-blocks")
    )
    found, expected = losses(step, tokens), losses(eager, tokens)
    assert found[:2] == pytest.approx(expected[:2], rel=2e-3)
    assert found == pytest.approx(expected, rel=1e-2)  # AdamW's first updates are signs, which rounding flips
    ran = attention.seen("cuda", profiling.kernels_seen(lambda: step(tokens, tokens), "cuda").names)
    assert {"flash", "cudnn"} & set(ran)
    assert "mem_efficient" not in ran
