"""A checkpoint of N ranks gives M ranks the same training state, bit for bit."""

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_cases import RECIPES, a_step, batch
from torch import Tensor, nn

from te_bench.models.adopt import adopt
from te_bench.training import resume
from te_bench.training.parallel import SINGLE
from te_bench.training.step import Optim, TrainStep

CASES = Path(__file__).with_name("resume_cases.py")
DRAWS = {"tp": 1}  # ranks that share layers draw alike, unless they share the tokens between them, too
KINDS = ("ddp", "fsdp2", "tp", "zero1")


@pytest.fixture(scope="module")
def found() -> Any:
    """What 2 ranks wrote, 4 read and wrote, and one process read: one launch for all tests."""
    done = subprocess.run([sys.executable, str(CASES)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_goes_on_as_if_it_had_not_stopped(found: Any, kind: str) -> None:
    said = found["written"][kind]
    assert said["number"] == 2
    assert said["loaded"] == said["state"]
    assert said["resumed"] == said["went on"]
    assert said["same random"]
    assert {"scale_fwd", "amax_history_bwd", "exp_avg", "exp_avg_sq", "step", "weight"} <= {
        name.rpartition(".")[2].removeprefix("fp8_") for name in said["state"]
    }


@pytest.mark.parametrize(
    "pair",
    [
        *("ddp ddp", "fsdp2 zero1", "zero1 hsdp", "zero1 fsdp2", "ddp table"),
        *("tp fsdp2+tp", "zero1 fsdp2+tp", "tp fsdp2", "fsdp2 tp"),
    ],
)
def test_four_ranks_have_what_two_had(found: Any, pair: str) -> None:
    """Under another mode, too; and no two ranks with rows of their own draw the same masks."""
    said = found["in four"][pair]
    assert said["state"] == found["written"][pair.partition(" ")[0]]["state"]
    assert (said["number"], said["rate"], said["random"]) == (
        2,
        pytest.approx(3e-3),
        DRAWS.get(pair.partition(" ")[2], 4),
    )


def test_one_process_has_what_four_had(found: Any) -> None:
    """Of te-bench's AdamW under zero1, too, whose moments each rank has some of."""
    one = found["in one"]
    assert one["table"] == found["written"]["ddp"]["state"]
    assert one["hsdp"] == one["fsdp2"] == one["fsdp2+tp"] == found["written"]["zero1"]["state"]


def test_one_process_writes_and_reads_them_too(tmp_path: Path) -> None:
    step = a_step(SINGLE, "fp8")
    step(*batch(0))
    resume.save(step, tmp_path / "at", 1)
    straight = step(*batch(1)).item()
    other = a_step(SINGLE, "fp8", seed=1)
    assert resume.load(other, tmp_path / "at") == 1
    assert other(*batch(1)).item() == straight
    with pytest.raises(ValueError, match=r"has a checkpoint already: give each a folder of its own, as step-1"):
        resume.save(step, tmp_path / "at", 1)


def test_te_benchs_optimizer_names_what_saves_it() -> None:
    with pytest.raises(ValueError, match=r"save and load the whole step by te_bench\.training\.resume"):
        a_step(SINGLE, "fp8", optimizer="reference").optimizer.state_dict()


def test_a_checkpoint_before_the_first_step_changes_nothing(tmp_path: Path) -> None:
    straight, saved, other = a_step(SINGLE, "bf16"), a_step(SINGLE, "bf16"), a_step(SINGLE, "bf16", seed=1)
    resume.save(saved, tmp_path / "at", 0)
    with pytest.raises(ValueError, match="another model"):
        resume.load(a_step(SINGLE, "fp8", optimizer="reference"), tmp_path / "at")
    assert resume.load(other, tmp_path / "at") == 0
    losses = [[step(*batch(number)).item() for number in range(3)] for step in (straight, saved, other)]
    assert losses[1] == losses[2] == losses[0]


def test_what_cannot_be_written_or_read_is_an_error_that_names_the_folder(tmp_path: Path) -> None:
    """torch raises what is no Exception, of which a trial would die without a reply."""
    step, limit = a_step(SINGLE, "bf16"), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limit[1]))  # as a full disk
    try:
        with pytest.raises(OSError, match=r"^cannot write the checkpoint .*/full: "):
            resume.save(step, tmp_path / "full", 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    resume.save(step, tmp_path / "at", 1)
    for part in (tmp_path / "at").glob("*.distcp"):
        part.unlink()
    with pytest.raises(OSError, match=r"^cannot read the checkpoint .*/at, which may be damaged: FileNotFoundError"):
        resume.load(step, tmp_path / "at")


@pytest.mark.parametrize("share", [0, 0.1, 0.5, 0.99])
def test_a_list_of_contents_that_is_cut_off_is_a_damaged_checkpoint(tmp_path: Path, share: float) -> None:
    step = a_step(SINGLE, "bf16")
    resume.save(step, tmp_path / "at", 1)
    contents = tmp_path / "at" / ".metadata"
    whole = contents.read_bytes()
    contents.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(OSError, match=r"^cannot read the checkpoint .*/at, which may be damaged: \.metadata: "):
        resume.load(step, tmp_path / "at")


@pytest.mark.parametrize("optimizer", [None, "reference"])
def test_fp8_may_begin_where_bf16_ended(tmp_path: Path, optimizer: str | None) -> None:
    """Its scales are as those of a model that has seen nothing, where they were, whatever they were."""
    trunk, other = (a_step(SINGLE, precision, optimizer=optimizer) for precision in ("bf16", "fp8"))
    trunk(*batch(0))
    resume.save(trunk, tmp_path / "at", 1)
    other.gradients(*batch(1), records=True)
    before = {id(p) for p in other.model.parameters()}
    fresh = a_step(SINGLE, "fp8", optimizer=optimizer)
    for step in (other, fresh):  # whether or not it has scales to lose
        with pytest.raises(
            ValueError, match=r"at has no scales of FP8, .*: for FP8 to begin here, .* give begin_fp8=True$"
        ):
            resume.load(step, tmp_path / "at")
    assert resume.load(other, tmp_path / "at", begin_fp8=True) == 1
    assert resume.load(fresh, tmp_path / "at", begin_fp8=True) == 1
    assert [step(*batch(1)).item() for step in (other, other)] == [step(*batch(1)).item() for step in (fresh, fresh)]
    assert {id(p) for p in other.model.parameters()} == before
    state, clean = other.model.state_dict(), fresh.model.state_dict()
    assert all(torch.equal(value, clean[name]) for name, value in state.items())


def test_a_checkpoint_without_scales_goes_on_where_none_are_lost(tmp_path: Path) -> None:
    """Of an FP8 step that has not run, and into a recipe that keeps none."""
    resume.save(a_step(SINGLE, "fp8"), tmp_path / "unrun", 0)
    assert resume.load(a_step(SINGLE, "fp8"), tmp_path / "unrun") == 0
    trunk = a_step(SINGLE, "bf16")
    trunk(*batch(0))
    resume.save(trunk, tmp_path / "at", 1)
    assert resume.load(a_step(SINGLE, "fp8", recipe=RECIPES["current"]), tmp_path / "at") == 1


class WithAnUnusedWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head, self.unused = nn.Embedding(50, 16), nn.Linear(16, 50), nn.Linear(3, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.embedding(tokens))
        return out


def test_a_parameter_without_gradients_has_no_moments(tmp_path: Path) -> None:
    step, other = (TrainStep(adopt(WithAnUnusedWeight()), Optim(), precision="fp32", mode="eager") for _ in range(2))
    step(*batch(0))
    resume.save(step, tmp_path / "at", 1)
    assert resume.load(other, tmp_path / "at") == 1
    assert len(other.optimizer.state) == len(step.optimizer.state) == 3
    assert other(*batch(1)).item() == step(*batch(1)).item()
    assert torch.equal(other.model.module.unused.weight, step.model.module.unused.weight)


def test_what_is_no_checkpoint_of_this_step_is_refused(tmp_path: Path) -> None:
    step = a_step(SINGLE, "bf16")
    with pytest.raises(ValueError, match="nowhere has no checkpoint of te_bench"):
        resume.load(step, tmp_path / "nowhere")
    torch.distributed.checkpoint.save({"a": torch.zeros(1)}, checkpoint_id=tmp_path / "other", no_dist=True)
    with pytest.raises(ValueError, match="other is a checkpoint of another program"):
        resume.load(step, tmp_path / "other")
    resume.save(step, tmp_path / "at", 0)
    before = [p.clone() for p in step.model.parameters()]
    with pytest.raises(
        ValueError, match=r"at has no optimizer.state.step.step: it is of another model, precision or opt"
    ):
        resume.load(a_step(SINGLE, "bf16", optimizer="reference"), tmp_path / "at")
    assert all(torch.equal(p, was) for p, was in zip(step.model.parameters(), before, strict=True))
