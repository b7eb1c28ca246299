"""On a GPU that is not the current one everything computes what it does there."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fp8_cases import RECIPES, model, train
from torch import Tensor, nn

import te_bench.models as te
from te_bench.kernels import attention as backends
from te_bench.kernels import linear_cross_entropy as heads
from te_bench.models import recipe as recipes
from te_bench.models.zoo.gpt import GPT, GPTConfig
from te_bench.training.data import Batches
from te_bench.training.step import Optim, TrainStep

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
CONFIG = GPTConfig(n_layer=2, n_head=2, n_embd=128, block_size=128, vocab_size=500)


@pytest.fixture(autouse=True)
def _the_first_stays_the_current_one() -> None:
    torch.cuda.set_device(0)


@pytest.mark.parametrize("name", RECIPES)
def test_modules(name: str) -> None:
    found = []
    for device in ("cuda:1", "cuda:0"):  # what is compiled is compiled for the other one first
        layers = model(device)
        found.append([t.cpu() for t in train(layers, layers, RECIPES[name])])
        assert torch.cuda.current_device() == 0
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_two_models_at_once_under_delayed_scaling() -> None:
    """Their states take one step together."""
    both = [model("cuda:1"), model("cuda:0")]
    found: list[list[Tensor]] = [[], []]
    for k in range(4):
        with te.autocast(recipe=RECIPES["delayed"]):
            losses = [m(torch.full((8, 32), 2.0**k, device=f"cuda:{1 - i}")).sum() for i, m in enumerate(both)]
        for kept, one, loss in zip(found, both, losses, strict=True):
            loss.backward()
            kept += [loss.detach().cpu(), *(value.cpu() for value in one.state_dict().values())]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("mode", ["eager", "cudagraph"])
@pytest.mark.parametrize("attention", ["flash", "triton", "gluon"])
@pytest.mark.parametrize("recipe", ["delayed_scaling", "float8_current_scaling"])
def test_the_fused_step(recipe: str, attention: str, mode: str) -> None:
    found = []
    for device in ("cuda:1", "cuda:0"):
        torch.manual_seed(0)
        options = {"recipe": recipes.load(recipe), "head": "chunked", "blocks": "fused"}
        gpt = GPT(CONFIG, attention=attention, padded_vocab_size=512, **options).to(device)
        step = TrainStep(gpt, Optim(), precision="fp8", mode=mode, optimizer="triton")
        batches = Batches(None, block=128, batch=4, vocab=500, seed=7)
        found.append([step(*(x.to(device) for x in batches.at(k))).item() for k in range(5)])
        assert torch.cuda.current_device() == 0
    assert found[0] == pytest.approx(found[1], rel=1e-3)


def on_both(compute: Callable[[str], list[Tensor]]) -> None:
    """`compute` leaves the same on the other GPU, which has its turn first, and on the current one."""
    found = []
    for device in ("cuda:1", "cuda:0"):
        torch.manual_seed(0)
        found.append([t.detach().double().cpu() for t in compute(device)])
        assert torch.cuda.current_device() == 0
    for i, (ours, theirs) in enumerate(zip(*found, strict=True)):
        assert ours.isfinite().all(), i
        assert (ours - theirs).norm() <= 1e-3 * theirs.norm(), i


def drawn(*shape: int, device: str, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, torch.bfloat16).requires_grad_()


LAYERS: dict[str, dict[str, Any]] = {
    "GELU": {},
    "RMSNorm, SwiGLU, groups": {
        "normalization": "RMSNorm",
        "activation": "swiglu",
        "zero_centered_gamma": True,
        "num_gqa_groups": 2,
        "fuse_qkv_params": True,
    },
    "dropout": {"hidden_dropout": 0.1},  # its modules one by one
}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("recipe", ["none", "delayed_scaling", "float8_current_scaling_dpa", "float8_block_scaling"])
def test_a_transformer_layer_with_rotary_positions(recipe: str, layer: str) -> None:
    asked = None if recipe == "none" else recipes.load(recipe)
    options = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "params_dtype": torch.bfloat16, **LAYERS[layer]}

    def compute(device: str) -> list[Tensor]:
        made = te.TransformerLayer(256, 512, 4, **options)  # on one GPU, whichever is asked for: the same numbers
        made, angles = made.to(device), te.RotaryPositionEmbedding(64)(128).to(device)
        found: list[Tensor] = []
        for step in range(3):
            torch.manual_seed(step)
            x = drawn(128, 2, 256, device=device, seed=step)
            with te.autocast(enabled=asked is not None, recipe=asked):
                y = made(x, rotary_pos_emb=angles)
            made.zero_grad()
            y.float().square().mean().backward()
            assert x.grad is not None
            found += [y, x.grad]
            for name, p in made.named_parameters():
                if (
                    p.grad is not None and "key_bias" not in name and "qkv.bias" not in name
                ):  # the keys' is 0: only noise
                    found.append(p.grad.clone())
        return found

    on_both(compute)


@pytest.mark.parametrize("asked", [{"attn_mask_type": "causal"}, {"attn_mask_type": "causal", "window_size": (32, 0)}])
@pytest.mark.parametrize("name", backends.names())
def test_attention(name: str, asked: dict[str, Any]) -> None:
    def compute(device: str) -> list[Tensor]:
        q, k, v = (drawn(192, 2, 4, 64, device=device, seed=i) for i in range(3))
        try:
            with te.attention_kernel(name):
                out = te.DotProductAttention(4, 64, **asked)(q, k, v)
        except ValueError as reason:
            pytest.skip(str(reason))
        out.float().square().mean().backward()
        return [out, *(t.grad for t in (q, k, v) if t.grad is not None)]

    on_both(compute)


def test_packed_sequences() -> None:
    def compute(device: str) -> list[Tensor]:
        q, k, v = (drawn(192, 4, 64, device=device, seed=i) for i in range(3))
        starts = torch.tensor([0, 50, 192], dtype=torch.int32, device=device)
        core = te.DotProductAttention(4, 64, qkv_format="thd", attn_mask_type="padding_causal")
        with te.attention_kernel("triton"):
            out = core(q, k, v, cu_seqlens_q=starts, cu_seqlens_kv=starts, max_seqlen_q=142, max_seqlen_kv=142)
        out.float().square().mean().backward()
        return [out, *(t.grad for t in (q, k, v) if t.grad is not None)]

    on_both(compute)


def trained(device: str, precision: str, mode: str, **options: Any) -> list[Tensor]:
    """Losses of five steps."""
    recipe = recipes.load("delayed_scaling") if precision == "fp8" else None
    gpt = GPT(CONFIG, attention="flash", padded_vocab_size=512, recipe=recipe, **options).to(device)
    step, batches = (
        TrainStep(gpt, Optim(), precision=precision, mode=mode),
        Batches(None, block=128, batch=4, vocab=500, seed=7),
    )
    return [step(*(x.to(device) for x in batches.at(k))) for k in range(5)]


@pytest.mark.parametrize("head", heads.names())
def test_heads(head: str) -> None:
    on_both(lambda device: trained(device, "fp8", "eager", head=head))


@pytest.mark.parametrize("mode", ["compile", "compile-reduce-overhead", "cudagraph"])
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_compiled_steps(precision: str, mode: str) -> None:
    on_both(lambda device: trained(device, precision, mode))


def test_an_activation_checkpoint() -> None:
    """It computes again in a thread of autograd's."""

    def compute(device: str) -> list[Tensor]:
        layers = model(device)
        return train(layers, lambda x: te.checkpoint(layers, x), RECIPES["delayed"])

    on_both(compute)


def test_scales_move_with_their_module() -> None:
    found = []
    for moved in (True, False):
        layers: nn.Module = model("cuda:0")
        train(layers, layers, RECIPES["delayed"])
        layers = layers.to("cuda:1") if moved else layers
        found.append([t.cpu() for t in train(layers, layers, RECIPES["delayed"])])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
