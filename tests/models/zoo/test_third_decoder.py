"""A decoder in one file, third/sandwich.py, gets all that GPT and Llama have: nothing else knows its class or its names."""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from te_bench.experiments import plan, trial, trial_model
from te_bench.experiments.measurement import Context
from te_bench.experiments.spec import Options
from te_bench.models import configs, cost, decoder, rivals, zoo
from te_bench.models import recipe as recipes

FOLDER = Path(__file__).parent / "third"
NAME = "sandwich"


@pytest.fixture
def third() -> Iterator[None]:
    """The files of `third`, as if they lay in models/zoo."""
    zoo.__path__.append(str(FOLDER))
    yield
    zoo.__path__.remove(str(FOLDER))
    for path in FOLDER.glob("*.py"):
        sys.modules.pop(f"{zoo.__name__}.{path.stem}", None)


def a_pass(blocks: str | None, recipe: str | None) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the second of two passes, when delayed scaling has scales."""
    torch.manual_seed(1)
    found = None if recipe is None else recipes.load(recipe)
    model = decoder.load(NAME, attention="manual", padded_vocab_size=320, recipe=found, head="chunked", blocks=blocks)
    tokens, targets = torch.randint(0, 256, (2, 2, 32), generator=torch.Generator().manual_seed(2))
    for _ in range(2):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16), model.autocast():
            loss = model(tokens, targets)
        loss.backward()
    assert not model.warned
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.usefixtures("third", "plain_heads")
@pytest.mark.parametrize("recipe", [None, "delayed_scaling", "float8_current_scaling", "float8_block_scaling"])
def test_its_fused_blocks_compute_what_its_modules_do(recipe: str | None) -> None:
    (ours, found), (loss, wanted) = a_pass("fused", recipe), a_pass(None, recipe)
    assert ours == pytest.approx(loss, rel=1e-6)
    assert found.keys() == wanted.keys()
    errors = [((found[name] - gradient).norm() / gradient.norm()).item() for name, gradient in wanted.items()]
    assert max(errors) < 3e-3, errors
    assert all((found[name][256:] == 0).all() for name in ("words.weight", "answer.weight"))  # the padding


@pytest.mark.usefixtures("third")
def test_a_norm_without_an_eps_is_refused_by_name() -> None:
    model = decoder.load(NAME, attention="manual")
    model.slices[0].bread = nn.RMSNorm(64)
    with pytest.raises(ValueError, match=r"RMSNorm\(\(64,\), eps=None.*set its eps to a number"):
        model.parts()


@pytest.mark.usefixtures("third")
def test_it_is_known_by_its_name_and_its_sizes() -> None:
    config = configs.configs()[NAME]
    model = decoder.build(config, attention="manual")
    assert cost.parameters(config, config.vocab_size) == sum(p.numel() for p in model.parameters())
    assert model.head_name == "answer"
    assert {name: list(rows) for name, rows in model.gradient_parts().items()} == {
        f"slices.{i}.mixed.weight": ["q", "k", "v"] for i in range(2)
    }


@pytest.mark.usefixtures("third")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("suite", ["nanogpt", "speed", "memory", "fp8", "curves", "convergence", "stress"])
def test_every_suite_of_models_plans_it(suite: str, device: str, tmp_path: Path) -> None:
    data = {"": "random"} if suite in ("curves", "convergence", "stress") else {}
    options = Options(device=device, model=NAME, seeds=1, data=data, cache=tmp_path)
    experiment = plan.resolve(suite, options)
    trials = [trial for trial in experiment.trials if trial.workload != "ceilings"]
    assert {trial.problem["model"] for trial in trials} == {NAME}
    assert len({trial.id for trial in trials}) == len(trials) >= 3
    assert NAME in experiment.title
    config = trial_model.config_of(trials[0])
    assert (config.family, config.shape.layers) == (NAME, 2)
    assert config.vocab_size == (250 if (suite, device) == ("speed", "cpu") else 256)


def te_bench(*arguments: object, folder: Path) -> str:
    """What te-bench prints in a process, and in processes of its own, whose zoo has the file."""
    (folder / "sitecustomize.py").write_text(
        f"import te_bench.models.zoo as zoo\nzoo.__path__.append({str(FOLDER)!r})\n"
    )
    root = str(Path(__file__).parents[3])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(folder), root))}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "te_bench.cli", *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_suites_measure_it_check_it_and_report_it(tmp_path: Path) -> None:
    only = "*chunked*/fp8/delayed_scaling/*"  # fused and not
    te_bench("run", "speed", "--model", NAME, "--device", "cpu", "--only", only, "--out", "out", folder=tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "out" / "journal.jsonl").read_text().splitlines()]
    records = [line["body"] for line in lines if line["kind"] == "record"]
    assert [record["outcome"] for record in records] == ["ok"] * 2
    assert all(
        {"loss", "grad words.weight"} <= {q["name"] for q in record["check"]["quantities"]} for record in records
    )
    ran = [record["work"]["ran"]["fused_blocks"] > 0 for record in records]
    fused = [record["trial"]["problem"].get("blocks") == "fused" for record in records]
    assert ran == fused
    assert set(fused) == {True, False}
    assert "sandwich, 4 x 64 tokens" in (tmp_path / "out" / "report" / "report.md").read_text()


@pytest.mark.usefixtures("third", "plain_heads")
def test_a_decoder_without_parts_has_all_but_the_fused_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """third/beside.py: attention beside the MLP, six Linears a block."""
    with pytest.raises(ValueError, match="blocks fused: Beside does not say its parts"):
        decoder.load("beside", blocks="fused")
    model = decoder.load("beside")
    assert [type(module).__name__ for module in model.attentions()] == ["Block", "Block"]
    monkeypatch.setattr("te_bench.models.rivals.liger.missing", lambda *_: None)
    of_liger = rivals.load("liger").unsupported(configs.configs()["beside"], "cuda", (9, 0))
    assert of_liger == "it does not say its parts"
    experiment = plan.resolve("speed", Options(device="cpu", model="beside"), only="*chunked*/[bf]*[6d]*")
    found = {(one.precision, one.problem.get("blocks")): trial.run(one, Context()) for one in experiment.trials}
    assert {how: reply["outcome"] for how, reply in found.items()} == {
        ("bf16", None): "ok", ("fp8", None): "ok", ("bf16", "fused"): "unsupported", ("fp8", "fused"): "unsupported",
    }  # fmt: skip
    assert found["fp8", "fused"]["reason"] == "blocks fused: beside does not say its parts"
    assert found["fp8", None]["work"]["ran"]["gemm_fp8"] == 2 * 6 * 3


@pytest.mark.usefixtures("third")
@pytest.mark.parametrize(
    ("own", "message"), [({"gpt2": None}, "calls a model 'gpt2', as another"), (None, "no CONFIGS")]
)
def test_its_names_are_its_own(own: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another's trials would be of this model, under the other's ids."""
    monkeypatch.setattr(importlib.import_module(f"{zoo.__name__}.{NAME}"), "CONFIGS", own)
    with pytest.raises(ValueError, match=f"sandwich.py of models/zoo .*{message}"):
        configs.configs()
