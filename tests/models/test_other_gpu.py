"""On a GPU that is not the current one everything computes what it does there."""

import pytest
import torch
from fp8_cases import RECIPES, model, train
from torch import Tensor

import te_bench.models as te
from te_bench.models import recipe as recipes
from te_bench.models.data import Batches
from te_bench.models.gpt import GPT, GPTConfig
from te_bench.models.train import Optim, TrainStep

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
