"""What torchtitan's steps over ranks do not go with is said in a sentence; what they compute test_parallel holds."""

import dataclasses
from typing import Any

import pytest

from te_bench.experiments import plan, trial_model
from te_bench.experiments.measurement import Unsupported
from te_bench.experiments.spec import Options, Trial
from te_bench.experiments.suite_trials import BENCH_PY
from te_bench.models import rivals

PROBLEM = {**BENCH_PY, "model": "tiny", "batch": 2, "block": 16, "vocab": 250, "padded_vocab": 256, "data": "random"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "rival torchtitan: its steps are over ranks; give --parallel fsdp2 or tp"),
        (
            {"parallel": "ddp", "world": 2},
            "parallel ddp: rival torchtitan divides its steps by fsdp2 or tp; choose one of them",
        ),
        (
            {"parallel": "fsdp2", "world": 2, "checkpointing": "blocks"},
            "parallel fsdp2: rival torchtitan has no gather and no checkpointing of te-bench's; leave them out",
        ),
    ],
)
def test_what_it_does_not_go_with_is_said_in_a_sentence(settings: dict[str, Any], message: str) -> None:
    problem = {**PROBLEM, "rival": "torchtitan", **settings}
    with pytest.raises(Unsupported, match=message):
        trial_model.require_supported(Trial(workload="scaling", device="cpu", problem=problem, attention="flash"))


def test_a_rival_without_a_way_says_so_in_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Liger's, which a suite divides by an option as it does all training steps."""
    able = dataclasses.replace(rivals.load("liger"), unsupported=lambda *_: None)
    monkeypatch.setattr("te_bench.models.rivals.liger.RIVAL", able)
    options = Options(device="cpu", model="llama-tiny", gpus_per_trial=2, parallel="fsdp2")
    [liger] = [t for t in plan.resolve("speed", options).trials if t.problem.get("rival") == "liger"]
    with pytest.raises(Unsupported, match="parallel fsdp2: rival liger has no step over ranks; choose te-bench's own"):
        trial_model.require_supported(liger)
