"""What a Trainer of transformers may be asked for with a converted model: it works, or one sentence says why it does not."""

import copy
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from on_cpu import on_the_cpu_unless_marked
from torch import Tensor, nn

import te_bench.models as te
from te_bench.models import recipe

transformers = pytest.importorskip("transformers")
state = pytest.importorskip("accelerate.state", reason="needs accelerate: pip install accelerate")

__all__ = ["on_the_cpu_unless_marked"]

VOCAB = 64
DELAYED = recipe.DelayedScaling(amax_history_len=16)
CURRENT = recipe.Float8CurrentScaling()

Train = Callable[..., tuple[Any, float]]


@pytest.fixture(autouse=True)
def no_accelerator() -> Iterator[None]:
    """Accelerate keeps its settings for the process, and refuses others."""
    yield
    state.AcceleratorState._reset_state(True)


def a_llama() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model: nn.Module = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=VOCAB, **sizes))
    return model


def a_gpt2() -> nn.Module:
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 16, "bos_token_id": 0, "eos_token_id": 0}
    model: nn.Module = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=VOCAB, **sizes))
    return model


def a_trainer(folder: Path, model: nn.Module, **settings: Any) -> Any:
    texts = torch.randint(VOCAB, (32, 16), generator=torch.Generator().manual_seed(1))
    rows = [{"input_ids": text, "labels": text} for text in texts]
    given = {"bf16": True, "max_steps": 4, "save_steps": 2, "learning_rate": 1e-2, **settings}
    batches = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    quiet = {"report_to": "none", "disable_tqdm": True, "logging_strategy": "no"}
    options = transformers.TrainingArguments(
        str(folder), use_cpu=not torch.cuda.is_available(), **batches, **quiet, **given
    )
    return transformers.Trainer(model, options, train_dataset=rows, eval_dataset=rows[:8])


@pytest.fixture
def train(tmp_path: Path) -> Train:
    """train(recipe, **settings): the trained model, and the loss of texts that it was trained on, or of its training."""

    def run(
        choice: recipe.Recipe | None,
        *,
        cached: bool = True,
        evaluate: bool = True,
        resume: str | None = None,
        to: str = "out",
        **settings: Any,
    ) -> tuple[Any, float]:
        model = a_llama()
        if choice is not None:
            te.convert(model, choice)
        trainer = a_trainer(tmp_path / to, model, **settings)
        if choice is not None and cached:
            te.cache_weights(model, trainer.create_optimizer())
        trained = trainer.train(resume_from_checkpoint=None if resume is None else str(tmp_path / resume))
        return model, trainer.evaluate()["eval_loss"] if evaluate else trained.training_loss

    return run


@pytest.mark.parametrize("place", ["Hugging Face Trainer", "Accelerate", "Lightning", "A loop of your own"])
def test_the_page_s_programs_train(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # Lightning logs where it is
    if place == "Lightning":
        pytest.importorskip("pytorch_lightning", reason="needs Lightning: pip install pytorch-lightning")
    page = (Path(__file__).parents[1] / "docs" / "trainers.md").read_text()
    section = page.partition(f"\n## {place}\n")[2].partition("\n## ")[0]
    [program] = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    model = a_llama()
    before = copy.deepcopy(model.state_dict())
    trainer = a_trainer(tmp_path, model)
    texts = trainer.train_dataset
    batches = torch.utils.data.DataLoader([row["input_ids"] for row in texts], batch_size=4)
    if place == "A loop of your own":
        batches = [batch.to(trainer.args.device) for batch in batches]
    exec(program, {"model": model, "settings": trainer.args, "texts": texts, "batches": batches})
    trained = model.state_dict()
    assert not any(torch.equal(value, trained[name].cpu()) for name, value in before.items())
    assert te.numerics(model)["lm_head"]["weight"]["scale"] > 1


def test_without_bf16_it_trains_in_fp8_from_float32(train: Train) -> None:
    plain, fp8 = (train(choice, bf16=False)[1] for choice in (None, DELAYED))
    assert plain != fp8
    assert abs(fp8 - plain) < 0.02


@pytest.mark.gpu
def test_with_fp16_losses_are_scaled_and_it_trains(train: Train) -> None:
    plain, fp8 = (train(choice, bf16=False, fp16=True)[1] for choice in (None, DELAYED))
    assert plain != fp8
    assert abs(fp8 - plain) < 0.05


@pytest.mark.parametrize(
    "kind", [{}, {"gradient_checkpointing_kwargs": {"use_reentrant": True}}], ids=["", "reentrant"]
)
@pytest.mark.filterwarnings("ignore:.gradient_checkpointing:FutureWarning")
def test_gradient_checkpointing_changes_no_bit(train: Train, kind: dict[str, Any]) -> None:
    assert train(DELAYED, gradient_checkpointing=True, **kind)[1] == train(DELAYED)[1]


def test_torch_compile_computes_what_a_model_without_cached_weights_does(train: Train) -> None:
    compiled = train(DELAYED, evaluate=False, torch_compile=True, torch_compile_backend="eager")[1]
    assert compiled == train(DELAYED, evaluate=False, cached=False)[1] != train(DELAYED, evaluate=False)[1]


def test_the_best_checkpoint_is_loaded_at_the_end(train: Train) -> None:
    model, loss = train(DELAYED, load_best_model_at_end=True, eval_strategy="steps", eval_steps=2)
    assert loss == train(DELAYED)[1]
    assert te.numerics(model)["lm_head"]["weight"]["scale"] > 1


def test_a_checkpoint_of_another_recipe_is_resumed_or_refused_in_one_sentence(train: Train) -> None:
    train(DELAYED, to="delayed")
    train(None, to="plain")
    assert train(CURRENT, resume="delayed/checkpoint-2")[1] < 4.2  # ln 64: it has learned
    assert train(DELAYED, resume="plain/checkpoint-2")[1] < 4.2
    assert train(None, resume="delayed/checkpoint-2")[1] < 4.2
    with pytest.raises(
        ValueError, match=r"\(16, 3\), this module's \(1024, 3\): load it under DelayedScaling\(amax_hist"
    ):
        train(recipe.DelayedScaling(), resume="delayed/checkpoint-2")
    e4m3 = recipe.DelayedScaling(amax_history_len=16, fp8_format=recipe.Format.E4M3)
    with pytest.raises(ValueError, match="its scales are of another fp8_format; load it under that one"):
        train(e4m3, resume="delayed/checkpoint-2")


def test_what_it_saves_transformers_loads(train: Train, tmp_path: Path) -> None:
    model, _ = train(DELAYED)
    plain = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out" / "checkpoint-4")
    assert not isinstance(plain.lm_head, te.Linear)
    saved: dict[str, Tensor] = model.state_dict()
    assert all(torch.equal(saved[name].cpu(), value) for name, value in plain.state_dict().items())


def test_a_model_that_is_converted_after_its_optimizer_was_made_is_named(tmp_path: Path) -> None:
    model = a_gpt2()
    optimizer = a_trainer(tmp_path, model).create_optimizer()
    te.convert(model, DELAYED)
    with pytest.raises(ValueError, match=r"no optimizer given has transformer.h.0.attn.c_attn.weight"):
        te.cache_weights(model, optimizer)


def test_a_lightning_module_that_nobody_would_call_is_refused() -> None:
    lightning = pytest.importorskip("pytorch_lightning", reason="needs Lightning: pip install pytorch-lightning")

    class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Sequential(nn.Linear(16, 16))

    module = Module()
    with pytest.raises(ValueError, match=r"Module is a LightningModule.*convert the model that training_step calls"):
        te.convert(module, DELAYED)
    assert isinstance(module.model[0], nn.Linear)
    te.convert(module.model, DELAYED)
    assert te.convert(module).found  # without a recipe te.autocast decides
