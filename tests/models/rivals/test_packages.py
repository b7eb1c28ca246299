"""The packages themselves, on a GPU: a small Llama's loss and gradients are close to those of te-bench's own eager pass."""

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from passes import NORMED, TINY, a_model, a_pass, errors

from te_bench.experiments import trial_model
from te_bench.experiments.checks import gradients, training_step, what_ran
from te_bench.experiments.instruments import profiling
from te_bench.experiments.measurement import Context, Measurement, Unsupported
from te_bench.experiments.spec import Trial
from te_bench.experiments.suite_trials import BENCH_PY
from te_bench.experiments.workloads import train_step
from te_bench.models import rivals, sources
from te_bench.models.configs import LlamaConfig
from te_bench.training.step import Optim, TrainStep

MODES = [(name, mode) for name in rivals.names() for mode in rivals.load(name).modes]

#: Heads that cuDNN takes, and sizes that FP8's products do, by blocks of 128 elements as well.
LENGTH = 128
LARGER = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "block_size": LENGTH}


def require(name: str, config: LlamaConfig) -> None:
    reason = rivals.load(name).unsupported(config, "cuda", torch.cuda.get_device_capability())
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.gpu
@pytest.mark.parametrize("name", rivals.names())
@pytest.mark.parametrize("config", [TINY, NORMED])
def test_loss_and_gradients_are_close_to_ours(config: LlamaConfig, name: str) -> None:
    config = dataclasses.replace(config, **LARGER)
    require(name, config)
    options: dict[str, Any] = {"attention": "cudnn"}
    theirs, ours = (a_model(config, rival, "cuda", **options) for rival in (name, None))
    with torch.autocast("cuda", torch.bfloat16):
        for _ in range(gradients.SETTLE + 1):
            loss, found = a_pass(theirs, LENGTH)
        expected, wanted = a_pass(ours, LENGTH)
    fp8 = rivals.load(name).recipe is not None
    assert loss == pytest.approx(expected, rel=1e-3)
    assert max(errors(found, wanted).values()) < (0.2 if fp8 else 0.03)


@pytest.mark.gpu
@pytest.mark.xdist_group("gpu-memory")  # each check takes half of a GPU's
@pytest.mark.parametrize(("name", "mode"), MODES)
def test_a_step_passes_its_check_and_shows_what_it_is_made_of(name: str, mode: str) -> None:
    rival = rivals.load(name)
    problem = {**BENCH_PY, "model": "llama3-1b", "batch": 1, "block": 256, "vocab": 128256, "padded_vocab": 128256}
    trial = Trial(
        workload="train_step",
        device="cuda",
        problem={**problem, "data": "random", "rival": name},
        attention="cudnn",
        precision=rival.precision,
        recipe=rival.recipe,
        mode=mode,
    )
    require(name, trial_model.config_of(trial))
    batches = train_step.random_batches(trial)
    step = trial_model.step_of(trial)
    training_step.check_step(trial, *batches[0], step)
    seen = profiling.kernels_seen(lambda: step(*batches[1]), "cuda")
    asked = what_ran.expected_of_step(trial, 256)
    ran = what_ran.require(trial, seen, Measurement(), asked).work["ran"]
    assert ran["gemm_half" if rival.recipe is None else "gemm_fp8"] >= 12 * 16


LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    **{"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "vocab_size": 1024, "max_position_embeddings": 128, "tie_word_embeddings": False},
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", rivals.adopting())
def test_a_step_of_a_user_s_model_passes_its_check_and_shows_what_it_is_made_of(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    source = sources.identify(str(tmp_path))
    assert source is not None
    rival = rivals.load(name)
    problem = {**BENCH_PY, **source.settings, "batch": 2, "block": 128, "vocab": 1024, "padded_vocab": 1024}
    trial = Trial(
        workload="train_step",
        device="cuda",
        problem={**problem, "data": "random", "rival": name},
        attention="own",
        precision=rival.precision,
        recipe=rival.recipe,
        mode=rival.modes[0],
    )
    try:
        trial_model.require_supported(trial)
    except Unsupported as reason:
        pytest.skip(str(reason))
    measured = train_step.run(trial, Context())
    assert measured.samples["latency_s"]
    linears = 0 if rival.recipe is None else 7 * 2
    assert measured.work["ran"]["gemm_fp8"] >= 3 * linears


@pytest.mark.gpu
def test_a_captured_step_of_transformer_engine_goes_on_with_its_scales() -> None:
    """Each replay moves the histories of amaxes, forward and backward."""
    config = dataclasses.replace(TINY, **LARGER)
    require("transformer_engine_delayed", config)
    model: Any = a_model(config, "transformer_engine_delayed", "cuda", attention="cudnn")
    step = TrainStep(model, Optim(), precision="fp8", mode="cudagraph")
    batch = torch.randint(0, config.vocab_size, (2, 2, LENGTH), device="cuda")
    layers = model.passes.body.args[0]
    seen = []
    for _ in range(3):
        step(*batch)
        metas = [module.fp8_meta for x in layers for module in (x.self_attention.proj, x.layernorm_mlp)]
        seen.append([meta[f"scaling_{way}"].amax_history.clone() for meta in metas for way in ("fwd", "bwd")])
    for before, after in itertools.pairwise(seen):
        assert not any(torch.equal(*histories) for histories in zip(before, after, strict=True))
