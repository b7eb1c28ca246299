"""N ranks with divided modules compute what one rank computes with whole ones, over gloo and NCCL."""

import copy
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import tensor_parallel_cases as cases
import torch

from te_bench.models.modules.tensor_parallel import Entry

PER_TENSOR = ("delayed", "current")


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Any]]:
    """What each of so many ranks found: one start for all tests."""
    known: dict[Any, list[Any]] = {}

    def launched(world: int, device: str = "cpu") -> list[Any]:
        if (world, device) not in known:
            path = tmp_path_factory.mktemp("ranks")
            command = [sys.executable, cases.__file__, str(path), device, str(world)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
            assert done.returncode == 0, done.stderr
            files = [path / f"{rank} of {world}.pt" for rank in range(world)]
            known[world, device] = [torch.load(file, weights_only=False) for file in files]
        return known[world, device]

    return launched


@pytest.fixture(
    params=[
        (2, "cpu"),
        pytest.param((4, "cpu"), marks=pytest.mark.slow),
        pytest.param((2, "cuda"), marks=[pytest.mark.gpu, pytest.mark.skipif("torch.cuda.device_count() < 2")]),
    ],
    ids=lambda given: f"{given[0]}-{given[1]}",
)
def ranks(request: pytest.FixtureRequest, launch: Callable[..., list[Any]]) -> list[Any]:
    return launch(*request.param)


@pytest.fixture
def details(launch: Callable[..., list[Any]]) -> list[dict[str, Any]]:
    return [found["details"] for found in launch(2)]


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("name", cases.MODULES)
def test_outputs_and_gradients_are_those_of_one_rank_to_rounding(ranks: list[Any], name: str, sequence: bool) -> None:
    for found in ranks:
        errors = found["plain"][name, sequence]
        assert len(errors) > 3
        assert max(errors.values()) <= 1e-10, errors


def test_fp8_is_that_of_one_rank_within_its_noise(ranks: list[Any]) -> None:
    """By delayed scaling, whose scales all ranks share, to rounding; else a rank's part has an amax of its own."""
    for found in ranks:
        assert len(found["fp8"]) == 2 * (
            len(cases.MODULES) + (len(cases.RECIPES) - 1) * 3 if len(ranks) == 2 else 2 * 3
        )
        for (kind, name, sequence), said in found["fp8"].items():
            for what, apart in said["apart"].items():
                allowed = 2e-6 if kind == "delayed" else 2.5 * said["noise"][what] + 2e-6
                assert apart <= allowed, (kind, name, sequence, what, apart)


@pytest.mark.parametrize("kind", cases.RECIPES)
def test_sequences_are_gathered_in_fp8_where_a_tensor_has_one_scale(ranks: list[Any], kind: str) -> None:
    """A column Linear's input for the forward pass and for its weight's gradient, a row Linear's gradient once."""
    if kind not in cases.recipes_of(len(ranks)):
        pytest.skip("two ranks show it")
    for found in ranks:
        gathers = {
            name: [each for each in found["fp8"][kind, name, True]["sent"] if each["name"] == "allgather_base"]
            for name in ("column", "row")
        }
        elements = cases.SEQUENCE * cases.BATCH
        once = kind not in PER_TENSOR
        assert [(each["dtype"], each["times"]) for each in gathers["column"]] == [
            ("float32", 1) if once else ("uint8", 2)
        ]
        size = 4 if once else 2
        assert gathers["column"][0]["bytes"] == size * elements * cases.HIDDEN
        assert [(each["dtype"], each["times"]) for each in gathers["row"]] == [("float32" if once else "uint8", 1)]
        assert gathers["row"][0]["bytes"] == (4 if once else 1) * elements * cases.FFN


def test_current_scaling_shares_the_amax_of_what_is_gathered_alone(ranks: list[Any]) -> None:
    for found in ranks:
        for name, sequence, shared in (("column", True, 1), ("row", True, 1), ("layer", True, 4)):
            said = [each for each in found["fp8"]["current", name, sequence]["sent"] if each["name"] == "allreduce"]
            assert [(each["times"], each["bytes"]) for each in said] == [(shared, 4 * shared)]


def test_packed_sequences_are_turned_by_angles_of_all_rows(details: list[dict[str, Any]]) -> None:
    assert max(found["packed"] for found in details) <= 1e-10


def test_parameters_have_megatrons_marks(details: list[dict[str, Any]]) -> None:
    divided = {"_weight": 0, "_bias": 0, "proj.weight": 1, "fc2_weight": 1}
    for found in details:
        for name, (dim, partial) in found["marks"].items():
            whole = "layer_norm" in name or name.endswith(("proj.bias", "fc2_bias"))
            expected = next((dim for end, dim in reversed(divided.items()) if name.endswith(end)), None)
            assert (dim, partial) == ((None, True) if whole else (expected, None)), name


def test_copies_know_the_group_and_what_was_loaded_is_told(details: list[dict[str, Any]]) -> None:
    for found in details:
        assert found["copied"]
        assert found["no group"].endswith("it knows no group: call set_tensor_parallel_group(group) first")
        assert found["loaded"]
        assert found["later"]


def test_weights_kept_over_micro_batches_and_activation_checkpoints(details: list[dict[str, Any]]) -> None:
    for found in details:
        assert torch.equal(found["first True"], found["first False"])
        assert found["checkpointed"]


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("not shared", "give te.autocast an amax_reduction_group with all of tp_group's ranks"),
        ("odd rows", "the first dimension=1 does not divide into tp_size=2 ranks"),
        ("odd heads", "num_attention_heads=3 does not divide into tp_size=2 ranks"),
        ("odd features", "out_features=63 does not divide into tp_size=2 ranks"),
        ("not set", "tp_size=2 needs set_parallel_mode=True, which divides the weights"),
        ("of another size", "the group has 2 ranks, but its weights are for tp_size=1: make it anew with tp_size=2"),
        ("row of a norm", "parallel_mode='row' is not possible: a norm needs whole rows; use 'column'"),
        ("overlap", "te_bench has no ub_overlap_rs at tp_size=2; leave it out"),
        ("two sizes", "tp_size=3, but tp_group has 2 ranks: give one of them"),
        ("no mode", "parallel_mode='rows' is not possible: None, column or row"),
    ],
)
def test_what_cannot_be_divided_is_said_in_a_sentence(details: list[dict[str, Any]], what: str, sentence: str) -> None:
    for found in details:
        assert sentence in found[what]


class TenRanks:
    """Of which each has the same."""

    def total(self, x: torch.Tensor) -> torch.Tensor:
        return 10 * x


@pytest.mark.parametrize("before", ["nothing", "a pass without gradients", "a pass that ended early", "another input"])
def test_an_input_s_gradient_is_whole_whatever_became_of_the_pass_before(before: str) -> None:
    entry = Entry(TenRanks(), readers=2)  # type: ignore[arg-type]
    x = torch.ones(3, requires_grad=True)
    if before == "a pass without gradients":
        with torch.no_grad():
            entry(x, x.dtype)
    elif before == "a pass that ended early":
        entry(x, x.dtype)
        x.data.add_(1)
        x.detach().add_(1)  # as a static input is written to
    elif before == "another input":
        entry(torch.zeros(3, requires_grad=True), x.dtype)
    taken = [copy.deepcopy(entry)(x, x.dtype), *(entry(x, x.dtype) for _ in range(2))][1:]
    torch.testing.assert_close(taken[0], x)
    (2 * taken[0] + 3 * taken[1]).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [50.0] * 3
