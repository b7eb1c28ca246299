"""The GPT: padding changes nothing, initialisation, tied head, counts of parameters and FLOP, dropout, bad input."""

import copy
import dataclasses
import io
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from te_bench.kernels import attention
from te_bench.models import recipe as recipes
from te_bench.models.recipe import float8_current_scaling
from te_bench.models.zoo.gpt import CONFIGS, GPT, GPTConfig
from te_bench.training.step import Optim, TrainStep

SMALL = GPTConfig(n_layer=2, n_head=4, n_embd=32, block_size=24, vocab_size=50)
WTE = "transformer.wte.weight"


def a_model(padded: int | None = None, *, seed: int = 0, attention: str = "manual", **changes: Any) -> GPT:
    torch.manual_seed(seed)
    return GPT(dataclasses.replace(SMALL, **changes), attention=attention, padded_vocab_size=padded)


def a_batch(batch: int = 4, length: int = 24, vocab: int = 50, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    both = torch.randint(0, vocab, (2, batch, length), generator=generator)
    return both[0], both[1]


def gradients(model: GPT, batch: tuple[Tensor, Tensor]) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad()
    loss = model(*batch)
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


# Padding.


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("padded", [51, 128])
@pytest.mark.parametrize("name", [n for n in attention.names() if n in ("manual", "math", "flash")])
def test_the_padded_model_is_the_unpadded_one(name: str, padded: int, dtype: torch.dtype) -> None:
    model, wide = a_model(attention=name).to(dtype), a_model(padded, attention=name).to(dtype)
    loss, grads = gradients(model, a_batch())
    wide_loss, wide_grads = gradients(wide, a_batch())
    unit = torch.finfo(dtype).eps
    assert wide_loss == pytest.approx(loss, rel=4 * unit)
    assert list(grads) == list(wide_grads)
    assert (wide_grads[WTE][50:] == 0).all()
    wide_grads[WTE] = wide_grads[WTE][:50]
    for key, grad in grads.items():
        assert (wide_grads[key] - grad).norm() <= 50 * unit * grad.norm(), key
        assert grad.norm() > 0, key


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8"])
def test_padding_stays_zero_and_harmless_under_adamw(precision: str) -> None:
    optim = Optim(learning_rate=1e-2, weight_decay=0.5, accumulate=2)
    runs = {}
    for padded in (50, 64):
        torch.manual_seed(0)
        recipe = float8_current_scaling.RECIPE if precision == "fp8" else None
        model = GPT(SMALL, attention="flash", padded_vocab_size=padded, recipe=recipe)
        step = TrainStep(model, optim, precision=precision, mode="eager")
        runs[padded] = model, [step(*a_batch(seed=k)).item() for k in range(6)]
    (model, losses), (wide, wide_losses) = runs[50], runs[64]
    padding = wide.transformer.wte.weight[50:]
    assert (padding == 0).all()
    assert wide_losses == pytest.approx(losses, rel={"fp32": 1e-5}.get(precision, 2e-3))
    with wide.autocast():
        assert wide.logits(a_batch()[0]).shape == (4, 24, 50)
    if precision == "fp32":
        torch.testing.assert_close(wide.logits(a_batch()[0]), model.logits(a_batch()[0]), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", recipes.names())
def test_every_recipe_is_nearly_the_same_model(name: str) -> None:
    """Gradients within FP8's error, and not nearer than FP8 can be; nothing of the padding, outside of the padding."""
    batch = a_batch()
    plain = a_model(padded=64, n_embd=64)
    model = GPT(plain.config, attention="manual", padded_vocab_size=64, recipe=recipes.load(name))
    model.load_state_dict(plain.state_dict())
    for _ in range(8):  # delayed scaling's way from scale 1 to the gradients' scales
        with model.autocast():
            loss = model(*batch)
        model.zero_grad()
        loss.backward()
    expected, grads = gradients(plain, batch)
    assert loss.item() == pytest.approx(expected, rel=1e-2)
    assert loss.item() != expected
    found = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == grads.keys()
    assert (found[WTE][50:] == 0).all()
    for key in grads:
        if grads[key].dim() == 2 and ".h." in key:
            error = ((found[key] - grads[key]).norm() / grads[key].norm()).item()
            assert 0.01 < error < (0.5 if recipes.load(name).nvfp4() else 0.25), key  # FP4 has a bit of mantissa, not 3


def test_fp8_outside_of_its_autocast_is_refused() -> None:
    model = GPT(SMALL, attention="manual", recipe=recipes.load("delayed_scaling"))
    with pytest.raises(ValueError, match=r"runs outside of autocast: with model.autocast\(\)"):
        model(*a_batch())
    with a_model().autocast():  # nothing to do, and no error
        pass


@pytest.mark.parametrize("attend", ["manual", "flash"])
def test_one_seed_gives_one_model_at_every_padded_width(attend: str) -> None:
    widths = [a_model(padded, attention=attend) for padded in (None, 51, 64, 1000)]
    for model in widths[1:]:
        assert (model.transformer.wte.weight[50:] == 0).all()
        for (name, a), (_, b) in zip(widths[0].named_parameters(), model.named_parameters(), strict=True):
            assert torch.equal(a, b[:50] if name == WTE else b)
    other = a_model(seed=1)
    assert not torch.equal(other.transformer.wte.weight, widths[0].transformer.wte.weight)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8"])
def test_the_gradient_of_the_padding_is_zero_on_a_gpu(precision: str) -> None:
    config = dataclasses.replace(CONFIGS["tiny"], vocab_size=50257)
    recipe = float8_current_scaling.RECIPE if precision == "fp8" else None
    torch.manual_seed(0)
    model = GPT(config, attention="math", padded_vocab_size=50304, recipe=recipe).cuda()
    step = TrainStep(model, Optim(), precision=precision, mode="eager")
    batch = a_batch(4, 64, vocab=50257)
    loss, found = step.gradients(*(t.cuda() for t in batch))
    assert (found[WTE][50257:] == 0).all()
    assert found[WTE][:50257].abs().sum() > 0
    assert loss == pytest.approx(math.log(50257), abs=0.2)
    step(*(t.cuda() for t in batch))
    assert (model.transformer.wte.weight[50257:] == 0).all()


# A head of its own.


def with_head(name: str) -> GPT:
    torch.manual_seed(0)
    return GPT(SMALL, attention="manual", padded_vocab_size=64, head=name)


@pytest.mark.usefixtures("plain_heads")
@pytest.mark.parametrize("name", ["reference", "chunked"])
def test_a_head_changes_how_the_loss_is_computed_and_nothing_else(name: str) -> None:
    loss, grads = gradients(a_model(64), a_batch())
    found, found_grads = gradients(with_head(name), a_batch())
    assert found == pytest.approx(loss, rel=1e-6)
    assert list(found_grads) == list(grads)
    assert (found_grads[WTE][50:] == 0).all()
    for key, grad in grads.items():
        assert (found_grads[key] - grad).norm() <= 1e-5 * grad.norm(), key
    assert torch.equal(with_head(name).logits(a_batch()[0]), a_model(64).logits(a_batch()[0]))


@pytest.mark.usefixtures("plain_heads")
def test_an_fp8_head_trains_in_fp8_and_is_evaluated_without() -> None:
    """So that the validation losses of arms with different heads are of their weights."""
    fp8, chunked, plain = with_head("fp8"), with_head("chunked"), a_model(64)
    loss, grads = gradients(plain, a_batch())
    rough, rough_grads = gradients(fp8, a_batch())
    assert 1e-6 < abs(rough - loss) < 1e-2
    assert 0.01 < (rough_grads[WTE] - grads[WTE]).norm() / grads[WTE].norm() < 0.25
    with torch.no_grad():
        evaluated = [model.eval()(*a_batch()).item() for model in (fp8, chunked, plain)]
    assert evaluated[0] == evaluated[1] == pytest.approx(evaluated[2], rel=1e-6)
    with pytest.raises(ValueError, match="Did you mean chunked"):
        with_head("chunkd")


# Initialisation and the head.


def test_the_head_is_the_embedding() -> None:
    model = a_model(64)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert "lm_head.weight" not in dict(model.named_parameters())
    with torch.device("meta"):
        model = GPT(SMALL)
    model.to_empty(device="cpu")
    model.init_weights()
    assert model.lm_head.weight is model.transformer.wte.weight


def test_the_model_written_out_in_numbers() -> None:
    """The forward pass again, in functions of one tensor, from the paper."""
    model = a_model(bias=True).double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    w = {name.removeprefix("transformer."): p.detach() for name, p in model.named_parameters()}
    tokens, targets = a_batch(2, 10)

    def norm(x: Tensor, name: str) -> Tensor:
        x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
        return x * w[f"{name}.weight"] + w[f"{name}.bias"]

    def project(x: Tensor, name: str) -> Tensor:
        return x @ w[f"{name}.weight"].t() + w[f"{name}.bias"]

    x = w["wte.weight"][tokens] + w["wpe.weight"][:10]
    for i in range(2):
        q, k, v = project(norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn").split(32, -1)
        heads = []
        for h in range(4):
            part = slice(8 * h, 8 * h + 8)
            scores = q[..., part] @ k[..., part].transpose(1, 2) / math.sqrt(8)
            scores += torch.full((10, 10), -math.inf, dtype=torch.float64).triu(1)
            heads.append(scores.exp() / scores.exp().sum(-1, keepdim=True) @ v[..., part])
        x = x + project(torch.cat(heads, -1), f"h.{i}.attn.c_proj")
        wide = project(norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc")
        wide = wide * 0.5 * (1 + torch.erf(wide / math.sqrt(2)))
        x = x + project(wide, f"h.{i}.mlp.c_proj")
    logits = norm(x, "ln_f") @ w["wte.weight"].t()
    torch.testing.assert_close(model.logits(tokens), logits)
    torch.testing.assert_close(model(tokens, targets), F.cross_entropy(logits.flatten(0, 1), targets.flatten()))


# Counts.


@pytest.mark.parametrize(
    ("name", "published"),
    [("gpt2", 124439808), ("gpt2-medium", 354823168), ("gpt2-large", 774030080), ("gpt2-xl", 1557611200)],
)
def test_parameter_counts(name: str, published: int) -> None:
    """OpenAI's checkpoints have biases; nanoGPT, and so these configurations, have none: 124.34M for gpt2."""
    config = CONFIGS[name]
    layer = 12 * config.n_embd**2 + 2 * config.n_embd
    by_hand = (50257 + 1024) * config.n_embd + config.n_layer * layer + config.n_embd
    for bias, expected in ((True, published), (False, by_hand)):
        with torch.device("meta"):
            model = GPT(dataclasses.replace(config, bias=bias))
        assert sum(p.numel() for p in model.parameters()) == expected


def test_char_is_nanogpts_shakespeare_char() -> None:
    """nanoGPT prints 10.65M parameters, not counting positions."""
    with torch.device("meta"):
        model = GPT(CONFIGS["char"])
    count = sum(p.numel() for p in model.parameters()) - model.transformer.wpe.weight.numel()
    assert round(count / 1e6, 2) == 10.65


@pytest.mark.parametrize("padded", [50257, 50304])
def test_flop_per_token(padded: int) -> None:
    """Every multiplication of forward and backward, counted for GPT-2 124M at T = 1024; norms and embeddings are small."""
    with torch.device("meta"):
        model = GPT(CONFIGS["gpt2"], padded_vocab_size=padded)
    matrices = 12 * (768 * 3 * 768 + 768 * 768 + 2 * 768 * 4 * 768) + 768 * 50257
    scores = 12 * 2 * 1024 * 768  # q k^T and p v, every key for every query
    by_hand = 3 * 2 * (matrices + scores)
    assert model.flop_per_token(1024) == pytest.approx(by_hand, rel=2e-4)
    assert model.flop_per_token(1024) == 6 * (124337664 - 1024 * 768) + 12 * 12 * 768 * 1024


# Dropout and bad input.


@pytest.mark.parametrize("name", ["manual", "math"])
def test_dropout_is_for_training(name: str) -> None:
    model = a_model(attention=name, dropout=0.3)
    batch = a_batch()
    assert model(*batch) != model(*batch)
    torch.manual_seed(5)
    once = model(*batch)
    torch.manual_seed(5)
    assert torch.equal(model(*batch), once)
    model.eval()
    assert torch.equal(model(*batch), model(*batch))
    assert model(*batch) == a_model(attention=name).eval()(*batch)


def test_each_dropout_changes_the_loss_by_itself() -> None:
    """The embedding's, and in each block that of the attention's weights and those of both residuals."""
    model = a_model(dropout=0.5)
    places = [(module, "p") for module in model.modules() if isinstance(module, torch.nn.Dropout)]
    places += [(block.attn, "dropout") for block in model.transformer.h]
    assert len(places) == 1 + 2 * 3
    for alone in places:
        for place in places:
            setattr(*place, 0.5 if place is alone else 0.0)
        assert model(*a_batch()) != model(*a_batch())


def through_a_file(model: GPT) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.usefixtures("plain_heads")
@pytest.mark.parametrize(
    "duplicate",
    [lambda m: pickle.loads(pickle.dumps(m)), through_a_file, copy.deepcopy],
    ids=["pickle", "torch.save", "deepcopy"],
)
def test_it_can_be_pickled_and_computes_the_same(duplicate: Callable[[GPT], GPT]) -> None:
    """What a spawned process is given, or a file."""
    for options in ({}, {"blocks": "fused"}, {"head": "chunked"}, {"recipe": recipes.load("delayed_scaling")}):
        torch.manual_seed(0)
        model = GPT(SMALL, attention="math", **options)
        found = []
        for one in (model, duplicate(model)):
            with one.autocast():
                loss = one(*a_batch())
            loss.backward()
            found.append([loss, *(p.grad for p in one.parameters())])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)), options


def test_a_pickle_names_any_backend_and_loads_it_again() -> None:
    for name in attention.names():
        again = pickle.loads(pickle.dumps(GPT(SMALL, attention=name)))
        assert again.transformer.h[1].attn.attention.own is attention.load(name)


@pytest.mark.parametrize("head", [None, "chunked"])
def test_sequences_up_to_the_block_size_and_no_longer(head: str | None, plain_heads: None) -> None:
    model = GPT(SMALL, attention="manual", head=head)
    assert model(*a_batch(2, 24)).isfinite()
    assert model.logits(a_batch(2, 1)[0]).shape == (2, 1, 50)
    with pytest.raises(ValueError, match="25 tokens, but block_size is 24"):
        model(*a_batch(2, 25))


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="padded_vocab_size 49 < vocab_size 50"):
        a_model(49)
    with pytest.raises(ValueError, match="n_embd 32 is no multiple of n_head 5"):
        a_model(n_head=5)
    with pytest.raises(ValueError, match="unknown attention backend 'flesh'"):
        a_model(attention="flesh")
