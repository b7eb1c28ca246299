"""N ranks compute what one process computes of the same global batch: loss, gradients, norm, and a course of steps."""

import functools
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from te_bench.models.zoo.gpt import GPT, GPTConfig
from te_bench.training import parallel, ways
from te_bench.training.evaluation import evaluate
from te_bench.training.parallel import _vocabulary
from te_bench.training.step import Optim, TrainStep

CASES = Path(__file__).with_name("rank_cases.py")
MODES = ("ddp", "fsdp2", "tp", "zero1")
CASES_OF = (*MODES, "tp sp")  # with sequence parallelism


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def found(request: pytest.FixtureRequest) -> Any:
    """What rank 0 of so many found: one launch for all tests."""
    return _found(request.param)


@pytest.fixture(scope="module")
def of_two() -> Any:
    """What more two ranks found."""
    return _found(2)


@pytest.fixture(scope="module")
def in_groups() -> Any:
    """What four ranks found in two groups."""
    return _found("groups")


def _found(cases: int | str) -> Any:
    reply = _replies("4" if cases == 4 else "2 groups")[str(cases)]
    assert reply["outcome"] == "ok", reply["reason"]
    return reply["found"]


@functools.cache
def _replies(cases: str) -> Any:
    """Of these, by one process: what it imports takes longest."""
    path = os.pathsep.join([str(CASES.parents[1]), os.environ["PYTHONPATH"]])
    interpreted = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    command = [sys.executable, str(CASES), *cases.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=interpreted)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("mode", "options", "asked", "message"),
    [
        ("tp", {}, {"optimizer": "reference"}, "parallel tp: the optimizer reference clips by one rank's gradients"),
        ("fsdp2", {}, {"optimizer": "reference"}, "parallel fsdp2: the optimizer reference updates whole parameters"),
        ("fsdp2", {}, {"mode": "compile-reduce-overhead"}, "parallel fsdp2: torch.compile's own CUDA graphs have no"),
        ("fsdp2", {"gather": "fp8"}, {}, "gather fp8: it is for eager steps in FP8, not for bf16"),
        ("fsdp2", {"gather": "bf16"}, {}, "gather bf16: fp8 is all there is"),
    ],
)
def test_a_step_that_cannot_be_divided_so_is_refused_in_python_too(
    alone: None, mode: str, options: dict[str, Any], asked: dict[str, Any], message: str
) -> None:
    how = {"precision": "bf16", "mode": "eager", **asked}
    with pytest.raises(ValueError, match=message):
        TrainStep(nn.Linear(4, 4), Optim(), parallel=parallel.load(mode, **options), **how)


def test_blocks_in_a_sequential_are_gathered_one_by_one(alone: None) -> None:
    """As they are checkpointed one by one; a lone Linear is no block."""
    layers = nn.Sequential(nn.Linear(4, 4), *(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2)))
    assert parallel.load("fsdp2").gathered(nn.ModuleDict({"layers": layers}), None) == {"bfloat16": (128, 128)}


@pytest.mark.parametrize("other", [False, True], ids=["fsdp2", "torchtitan"])
def test_compiled_head_and_loss_keep_no_more_than_one_process_s(
    alone: None, other: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the backward pass, as a compiler divides it: one set of logits, in bf16. The loss is as before."""
    compile = functools.partial(torch.compile, backend="aot_eager_decomp_partition")  # keeps what Inductor keeps
    monkeypatch.setattr(torch, "compile", compile)
    config = GPTConfig(n_layer=1, n_head=2, n_embd=32, block_size=64, vocab_size=500)
    tokens = torch.randint(0, 500, (2, 64), generator=torch.Generator().manual_seed(0))
    kept, losses = [], []
    for divided in (ways.kind("torchtitan", "fsdp2")() if other else parallel.load("fsdp2"), parallel.SINGLE):
        torch.manual_seed(0)
        torch._dynamo.reset()
        model = GPT(config, attention="manual", padded_vocab_size=512)
        step = TrainStep(model, Optim(), precision="bf16", mode="compile", parallel=divided)
        seen: list[torch.Tensor] = []
        with step.region(), saved_tensors_hooks(lambda x, seen=seen: (seen.append(x), x)[1], lambda x: x):  # type: ignore[misc]
            loss = step.forward(tokens, tokens)
        logits = {x.untyped_storage()._cdata: x for x in seen if x.shape == (2 * 64, 512)}
        kept.append(sum(x.nbytes for x in logits.values()))
        losses.append(loss.item())
    assert kept[0] <= kept[1] == 2 * 64 * 512 * 2
    assert losses[0] == pytest.approx(losses[1], rel=2**-8)


def test_an_evaluation_leaves_every_matrix_a_share(alone: None) -> None:
    """A captured step updates the shares alone, and a checkpoint asks for them."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=32, block_size=16, vocab_size=50), attention="manual")
    step = TrainStep(model, Optim(), precision="fp32", mode="eager", parallel=parallel.load("fsdp2"))
    batch = torch.zeros(2, 16, dtype=torch.int64)
    before = step(batch, batch).item()
    after = evaluate(model, iter([(batch, batch)]), "fp32")
    assert {type(p) for p in model.parameters() if p.dim() > 1} == {DTensor}
    with torch.no_grad():
        model.tables().tokens.weight.zero_()  # as a graph would, behind the gathered one's back
    assert evaluate(model, iter([(batch, batch)]), "fp32") == pytest.approx(math.log(50))
    assert before > after


def test_every_mode_is_tried() -> None:
    assert parallel.names() == sorted((*MODES, *parallel.GROUPED))


@pytest.mark.parametrize("mode", CASES_OF)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_is_that_of_the_global_batch_to_rounding(found: Any, mode: str, accumulate: int) -> None:
    """In float64, clipped, from weights that only rank 0 had."""
    errors = found[mode][f"accumulate {accumulate}"]
    assert all(error <= 1e-12 for error in errors.values()), errors


@pytest.mark.parametrize("mode", CASES_OF)
def test_a_course_of_steps_is_that_of_one_process_that_accumulates_the_same_slices(found: Any, mode: str) -> None:
    """AdamW divides by the root of squares, which makes 1e-16 of a gradient that is nearly 0 more: hence not 1e-12."""
    ours, slices = found[mode]["losses"]
    assert len(ours) == 6
    assert ours == pytest.approx(slices, rel=1e-10)
    assert found[mode]["weights"] <= 1e-8


@pytest.mark.parametrize("mode", CASES_OF)
def test_a_step_s_arithmetic_is_the_whole_model_s(found: Any, mode: str) -> None:
    """However much of the weights a rank has."""
    assert found[mode]["flop"] == 1


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "tp"])
def test_a_user_s_blocks_lie_in_lists_of_lists(of_two: Any, mode: str) -> None:
    assert of_two["nested"][mode] <= 1e-12


def test_a_user_s_pairs_are_divided_as_its_plan_says(found: Any) -> None:
    assert found["planned"] <= 1e-12


def test_a_model_without_pairs_is_told_how_to_name_them(of_two: Any) -> None:
    for name in ("not planned", "adopted"):
        assert of_two[name].startswith("tp: Nested says not how it divides: give it a tp_plan")
    assert of_two["whole"] == (
        "tp: the tp_plan of Gathered leaves every layer's result whole in each rank (colwise_gather_output and "
        "rowwise_split_input); give it one with pairs of colwise and rowwise, or choose ddp"
    )


def test_what_computes_in_place_of_divided_linears_adds_up_their_products(of_two: Any) -> None:
    """te.convert's MLPs; and torch's Linears, with their hooks and in each of their places, stay out of FP8 (2e-2 there)."""
    assert of_two["gated"].keys() == {"None", "mlp"}
    assert max(of_two["gated"].values()) <= 1e-5


def test_linears_of_one_input_add_up_its_gradient_once(of_two: Any) -> None:
    """Of two MLPs, whose first takes what has no gradient: a product each forward, one backward; then the loss.

    By te.convert's MLP, which computes both products at once, too; and in one graph of torch.compile's, which keeps nothing.
    """
    assert [each["times"] for each in of_two["gated sent"]] == [2 + 1 + 1] * 3
    assert of_two["gated fp8"] < 0.3  # by FP8 0.13, and 0.86 where nothing is added up
    said = of_two["compiled"]
    assert said["error"] <= 1e-5
    times = {each["name"]: each["times"] for each in said["sent"] if each["dtype"] == "float32"}
    assert times == {"all_reduce": 2 + 1, "allreduce": 1}
    assert said["graphs"] == [1, 0]
    assert said["copied"] == 12


def test_decoders_are_divided_by_their_parts(found: Any) -> None:
    """With groups of heads, gated MLPs and norms of heads, whose gradients are sums over the ranks.

    With biases, and vocabularies that do not divide evenly or of which a rank has padding alone.
    """
    assert len(found["decoders"]) == 4
    assert max(found["decoders"].values()) <= 1e-12


def test_what_does_not_divide_is_said_in_a_sentence(of_two: Any) -> None:
    heads, dropout = of_two["refused"]
    assert "tp: the 1 + 1 + 1 heads of 32 features of c_attn do not divide into" in heads
    assert dropout == "tp: dropout 0.1 would hide the same of every rank's heads; set it to 0, or choose ddp"


def test_tp_adds_up_two_products_of_a_pair(found: Any) -> None:
    """Of four pairs in two blocks, and of embedding and head as of one, each in the forward and in the backward pass.

    And the loss and the norm once, and of each row the largest logit, the sum of exponentials and the target's logit.
    """
    tokens = 8 * 16
    assert found["tp"]["collectives"] == [
        {"name": "all_reduce", "dtype": "float64", "times": 2, "bytes": 8 * 3 * tokens},
        {"name": "allreduce", "dtype": "float64", "times": 2 * 5 + 2, "bytes": 8 * (2 * 5 * tokens * 32 + 2)},
    ]


def test_sequence_parallelism_gathers_and_scatters_what_tp_adds_up(found: Any) -> None:
    """And adds up the gradients of what every rank has whole, gains and positions, together."""
    activations = 8 * 2 * 5 * 8 * 16 * 32
    said = {each["name"]: (each["times"], each["bytes"]) for each in found["tp sp"]["collectives"]}
    whole = (2 * 2 + 1) * 32 + 16 * 32
    assert said == {
        "all_reduce": (2, 8 * 3 * 8 * 16),
        "allgather_base": (2 * 5, activations),
        "reduce_scatter_base": (2 * 5, activations),
        "allreduce": (1 + 2, 8 * (whole + 2)),
    }


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_shared_loss_is_cross_entropy(alone: None, dtype: torch.dtype) -> None:
    """Over columns that are no padding, of targets that are not ignored; rounded to the logits' dtype once."""
    torch.manual_seed(0)
    logits = (8 * torch.randn(6, 12, dtype=torch.float64)).to(dtype).requires_grad_()
    targets = torch.tensor([0, 9, -1, 3, 9, 4])
    loss = _vocabulary.shared_entropy(logits, targets, 10, 0, dist.group.WORLD)
    (gradient,) = torch.autograd.grad(2 * loss, logits)
    exact = logits.detach().double().requires_grad_()
    expected = nn.functional.cross_entropy(exact[:, :10], targets, ignore_index=-1)
    (truth,) = torch.autograd.grad(2 * expected, exact)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12 if dtype is torch.float64 else 1e-6)
    torch.testing.assert_close(gradient, truth.to(dtype), rtol=1e-12 if dtype is torch.float64 else 2**-8, atol=0)


def test_what_sequence_parallelism_and_a_shared_vocabulary_have_not_is_said(of_two: Any) -> None:
    planned, tokens, logits, head = of_two["refused sp"]
    assert planned == "tp: sequence parallelism is for te-bench's decoders, and this is a Planned; leave it out"
    assert tokens == "the vocabulary: tokens of a sequence=15 does not divide into tp_size=2 ranks"
    assert logits.startswith("no rank has all logits where ranks share the vocabulary")
    assert head.startswith("tp: the model's head takes all tokens and the whole vocabulary; leave out the head, or")


def test_a_head_without_logits_takes_whole_tables(of_two: Any) -> None:
    """Of tp and fsdp2."""
    *ours, theirs = of_two["headed"]
    assert len(ours) == 2
    assert all(course == pytest.approx(theirs, rel=1e-5) for course in ours)


@pytest.mark.parametrize("mode", ["ddp", "tp"])
def test_no_rank_of_any_seed_draws_the_masks_of_another(of_two: Any, mode: str) -> None:
    """Of sequence parallelism, whose ranks have tokens of their own between layers, too."""
    assert len(set(of_two["seeds"][mode])) == len(of_two["seeds"][mode])
    assert len(set(of_two["dropped"])) == 2


def test_ddp_sends_each_gradient_once(found: Any) -> None:
    said = found["ddp"]["collectives"]
    assert said == [
        {"name": "allreduce", "dtype": "float64", "times": 2, "bytes": found["ddp"]["bytes"] + 8}  # the loss, too
    ]


def test_zero1_trains_as_ddp_and_each_rank_keeps_moments_of_its_own(found: Any) -> None:
    """No more than its part and a parameter: those are not cut. What a rank has updated it sends."""
    said = found["zero1"]
    assert said["losses"][0] == pytest.approx(found["ddp"]["losses"][0], rel=1e-14)
    elements = said["bytes"] // 8
    assert sum(said["moments"]) == 2 * elements
    assert max(said["moments"]) <= 2 * (elements / len(said["moments"]) + said["largest"])
    ddp, sent = found["ddp"]["collectives"][0], {each["name"]: each for each in said["collectives"]}
    assert sent["allreduce"] == ddp
    assert sent["broadcast"]["bytes"] == said["bytes"]
    assert sent["broadcast"]["times"] == len(said["moments"])


def test_zero1_shares_out_the_triton_adamw_too(of_two: Any) -> None:
    """In the interpreter, and in FP8 with copies of weights: the weights are ddp's bit for bit where nothing is clipped."""
    said = of_two["table"]
    assert said["triton"]
    assert said["fp8"]
    assert said["clipped"] <= 2**-21  # the norm is a sum of ranks' parts
    assert said["gradients"] <= 2**-18  # one process's, clipped; of float32, whose sums are in another order
    assert sum(said["moments"]) == 2 * said["elements"]
    assert max(said["moments"]) <= 2 * (said["elements"] / len(said["moments"]) + said["largest"])
    sent = {(each["name"], each["dtype"]): each for each in said["collectives"]}
    weights, norm = sent["broadcast", "float32"], sent["allreduce", "float64"]
    assert weights["times"] == len(said["moments"])
    assert (
        0 <= weights["bytes"] - 4 * said["elements"] < 4 * 64 * 30
    )  # each parameter begins at a multiple of 64 elements
    assert (norm["times"], norm["bytes"]) == (1, 8)


@pytest.mark.parametrize("optimizer", ["None", "reference"])
def test_ddp_sends_buckets_while_the_backward_pass_goes_on(of_two: Any, optimizer: str) -> None:
    """With the optimizer that computes with copies of the weights, too, whose gradients are bf16's."""
    said = of_two["buckets"][optimizer]
    assert said["during"] > 3
    assert 1 <= said["after"] <= 4  # the loss, what was left of a bucket, and tables that a head shares
    assert said["error"] < 2**-6


@pytest.mark.parametrize("mode", ["ddp", "fsdp2"])
def test_a_gradient_that_comes_in_parts_is_sent_when_it_is_whole(of_two: Any, mode: str) -> None:
    """As of a layer in several reentrant checkpoints, each of which is a backward pass within the pass."""
    assert of_two["in parts"][mode]["error"] < 1e-12


def test_a_gradient_whose_parts_the_first_pass_did_not_bring_is_refused(of_two: Any) -> None:
    said = of_two["in parts"]["ddp"]["refused"]
    assert said.startswith("this pass brought a gradient in more parts than the first"), said


@pytest.mark.parametrize("mode", ["ddp", "zero1"])
def test_a_parameter_that_no_rank_s_pass_reaches_stays_as_it_is(of_two: Any, mode: str) -> None:
    """As in one process, under te-bench's own optimizer, too."""
    said = of_two["unreached"][mode]
    assert said["stays"]
    assert said["error"] < 1e-5
    assert said["reached"] == ["mixed.bias", "mixed.weight", "own.bias", "own.weight"]


def test_fsdp2_gathers_matrices_and_scatters_their_gradients(found: Any) -> None:
    """Blocks are gathered for either pass, the tables once; vectors are whole in every rank."""
    said = {each["name"]: each for each in found["fsdp2"]["collectives"]}
    matrices = found["fsdp2"]["bytes"] - found["fsdp2"]["vector_bytes"]
    assert said["reduce_scatter_base"]["bytes"] == matrices
    assert said["allgather_base"]["bytes"] == 2 * matrices - found["fsdp2"]["table_bytes"]
    assert said["allreduce"]["bytes"] == found["fsdp2"]["vector_bytes"] + 8  # the loss
    assert {each["dtype"] for each in said.values()} == {"float64"}


def test_a_checkpoint_of_ranks_is_that_of_their_whole_weights(found: Any) -> None:
    for mode in CASES_OF:
        assert found[mode]["saved"] is True


def test_sequence_parallelism_gathers_in_fp8_by_scales_that_ranks_share(found: Any) -> None:
    """A column Linear's input for both passes, a row Linear's gradient for one; the head's input in bf16."""
    said = found["fp8"]["tp sp"]
    sent = {(each["name"], each["dtype"]): each["bytes"] for each in said["collectives"]}
    tokens = 8 * 16 * 32
    assert said["losses"] == found["fp8"]["tp"]["losses"]
    assert sent["allgather_base", "uint8"] == 4 * 3 * tokens
    assert sent["allgather_base", "bfloat16"] == 2 * tokens
    assert sent["allreduce", "float32"] < 4 * tokens
    asked = {"uint8": [4 * 2 * tokens, 4 * 4 * tokens], "bfloat16": [2 * tokens] * 2, "float32": [0, 4 * tokens]}
    assert said["asked"] == asked


@pytest.mark.parametrize("mode", ["ddp", "fsdp2", "tp", "tp sp"])
def test_delayed_scaling_has_the_same_scales_in_every_rank(found: Any, mode: str) -> None:
    """And the same weights; with ddp the fused blocks and the table of weights that are cast in the update, too."""
    said = found["fp8"][mode]
    assert said["scales"] == 2 * 2 * 4  # either direction of four Linears in two blocks
    assert said["alike"]
    assert said["losses"] == pytest.approx(said["one"], rel=4e-3)  # e4m3's own noise: 2^-4 of single elements


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_a_weight_gathered_in_fp8_is_what_one_process_casts(found: Any, recipe: str) -> None:
    """Bit for bit, in both passes and two micro-batches: of 4 Linears in 2 blocks. Other operators see the same weight.

    Scales begin at multiples of 16 bytes: cuBLASLt says CUBLAS_STATUS_NOT_SUPPORTED to others.
    """
    said = found["gathers"][recipe]
    assert said["same"].pop("aligned") == [2 * 2 * 4 * 2] * 2
    assert said["same"] == {when: [2 * 4 * 2, 2 * 4 * 2] for when in ("forward", "backward", "widened")}
    assert said["amaxes"]
    assert said["losses"] == pytest.approx(said["one"], rel=4e-3)
    assert said["saved"] is True


@pytest.mark.parametrize(("recipe", "reductions"), [("delayed", 4), ("current", 3)])
def test_a_gather_in_fp8_sends_bytes_and_shares_scales_once_a_step(found: Any, recipe: str, reductions: int) -> None:
    """Beside the loss and the vectors one for all weights, under delayed scaling one a forward pass, as without a gather."""
    said = found["gathers"][recipe]
    sent = {(each["name"], each["dtype"]): each for each in said["collectives"]}
    assert said["asked"] == {"uint8": [2 * said["elements"]] * 2}
    assert sent["allgather_base", "uint8"]["bytes"] == 2 * 2 * said["elements"]
    assert ("allgather_base", "bfloat16") not in sent
    assert sent["allreduce", "float32"]["times"] == reductions


def test_weights_gathered_in_fp8_alone_are_not_multiplied_in_another_precision(found: Any) -> None:
    assert found["gathers"]["current"]["refused"].startswith(
        "this step's weights are gathered in FP8, but the model's auto"
    )


@pytest.mark.parametrize("mode", ["fsdp2", "tp", "ddp"])
def test_another_project_s_step_is_that_of_the_global_batch_to_rounding(of_two: Any, mode: str) -> None:
    """torchtitan's and, by DistributedDataParallel, Transformer Engine's. In float64, clipped, with a padded vocabulary.

    And what three updates made of the weights.
    """
    said = of_two["rivals"]["replicated"] if mode == "ddp" else of_two["rivals"][mode]["errors"]
    assert said.keys() == {"gpt", "llama"}
    assert max(error for errors in said.values() for error in errors.values()) <= 1e-12, said


@pytest.mark.parametrize("mode", ["fsdp2", "tp", "ddp"])
def test_transformer_engine_s_layers_over_ranks_are_one_process_s_to_rounding(of_two: Any, mode: str) -> None:
    """te-bench's own in their place. In float64, of a Llama and a Qwen 3; bf16 and FP8 err as one process does."""
    said = of_two["engine"][mode]
    assert said["errors"].keys() == {"llama", "qwen 3"}
    assert max(error for errors in said["errors"].values() for error in errors.values()) <= 1e-12, said["errors"]
    for precision, most in (("bf16", 0.01), ("delayed", 0.05), ("current", 0.05)):
        ours, one = said[precision]["errors"]
        assert ours <= 1.1 * one <= 1.1 * most, precision
        assert said[precision]["losses"][0] == pytest.approx(said[precision]["losses"][1], rel=3e-3)


def test_transformer_engine_s_layers_send_what_their_way_says(of_two: Any) -> None:
    """Weights in bf16 for either pass under fsdp2; under tp what Linears are given in FP8. Delayed scaling sends amaxes."""
    for recipe in ("delayed", "current"):
        sharded, shared = (of_two["engine"][mode][recipe] for mode in ("fsdp2", "tp"))
        sent = {(each["name"], each["dtype"]): each for each in sharded["collectives"]}
        assert {"bfloat16": (sent["allgather_base", "bfloat16"]["bytes"],) * 2} == {
            dtype: tuple(asked) for dtype, asked in sharded["asked"].items()
        }
        assert sent["allreduce", "float32"]["times"] == (2 if recipe == "delayed" else 1)  # beside the loss
        sent = {each["dtype"]: each["bytes"] for each in shared["collectives"] if "gather" in each["name"]}
        assert sent.keys() == shared["asked"].keys() == {"uint8", "bfloat16", "float32"}
        assert all(least <= sent[dtype] <= most for dtype, (least, most) in shared["asked"].items())
        # Of four pairs in two blocks: a column Linear's input in either pass, a row Linear's gradient once.
        assert sent["uint8"] == 3 * 4 * 8 * 16 * 32
    assert of_two["engine"]["refused"].startswith(
        "tp: the 8 + 1 + 1 heads of 8 features of qkv_proj do not divide into 2 "
    )


@pytest.mark.parametrize("mode", ["ddp", "fsdp2", "tp"])
def test_transformer_engine_s_layers_go_over_ranks_in_eager_steps_by_torch_s_adamw(mode: str) -> None:
    refused = functools.partial(ways.kind("transformer_engine", mode).refused, blocks=None)
    assert refused(precision="fp8", mode="eager", optimizer=None) is None
    said = refused(precision="fp8", mode="cudagraph", optimizer=None)
    assert said == "Transformer Engine's layers go over ranks in eager steps, not in mode cudagraph"
    assert "optimizer triton" in refused(precision="fp8", mode="eager", optimizer="triton")
    assert "gradient scaler" in refused(precision="fp16", mode="eager", optimizer=None)


def test_torchtitan_gathers_all_weights_in_bf16(of_two: Any) -> None:
    """For either pass, but for last norm and head, which it keeps; and scatters their gradients in float32."""
    said = of_two["rivals"]
    sent = {(each["name"], each["dtype"]): each["bytes"] for each in said["fsdp2"]["collectives"]}
    assert sent["allgather_base", "bfloat16"] == 2 * (2 * said["elements"] - said["tables"])
    assert sent["reduce_scatter_base", "float32"] == 4 * said["elements"]
    assert {dtype for name, dtype in sent if "gather" in name} == {"bfloat16"}


def test_torchtitan_s_shared_layers_gather_and_scatter_parts_of_sequences(of_two: Any) -> None:
    """Of four pairs in two blocks and of head and embedding, in either pass; the loss's sums of each row are three."""
    sent = {(each["name"], each["dtype"]): each for each in of_two["rivals"]["tp"]["collectives"]}
    activations = 2 * 8 * 16 * 32
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
        assert sent[name, "bfloat16"]["bytes"] == 2 * 5 * activations
    assert sent["all_reduce", "float32"]["bytes"] == 4 * 3 * 8 * 16


@pytest.mark.parametrize("way", ["tensorwise fsdp2", "tensorwise tp", "rowwise fsdp2", "rowwise tp"])
def test_torchao_s_steps_send_fp8_where_a_tensor_has_one_scale(of_two: Any, way: str) -> None:
    """Weights, whose scales are one all-reduce for the 8 Linears, or activations; its arithmetic is emulated on a CPU."""
    if "torchao" not in of_two["rivals"]:
        pytest.skip("needs torchao")
    said = of_two["rivals"]["torchao"][way]
    assert 1e-3 < said["error"] < 0.2
    sent = {(each["name"], each["dtype"]): each for each in said["collectives"]}
    gathers = {dtype for name, dtype in sent if "gather" in name}
    assert ("uint8" in gathers) is way.startswith("tensorwise")
    assert ("uint8" in said["asked"]) is way.startswith("tensorwise")
    if way == "tensorwise tp":
        assert sent["all_gather_into_tensor", "uint8"]["bytes"] == said["asked"]["uint8"][0] == 2 * 4 * 8 * 16 * 32
    elif way == "tensorwise fsdp2":
        assert sent["allgather_base", "bfloat16"]["times"] == 3  # the embedding for either pass, the head once
        assert sent["allgather_base", "uint8"]["bytes"] == said["asked"]["uint8"][0]
        assert 4 * 8 in [each["bytes"] for each in said["collectives"]]


def test_torchtitan_refuses_what_is_not_its_llama_in_a_sentence(of_two: Any) -> None:
    norms, heads, dropout = of_two["rivals"]["refused"]
    assert norms == "tp: norms of heads are no part of torchtitan's Llama; choose fsdp2"
    assert heads.startswith("tp: the 1 heads of 32 features do not divide into")
    assert dropout == "tp: dropout 0.1 would hide the same of every rank's heads; choose fsdp2"


@pytest.mark.parametrize(
    ("mode", "others"), [("hsdp", ("nested",)), ("fsdp2+tp", ("planned", "qwen 3")), ("fsdp2+tp sp", ())]
)
def test_groups_make_one_process_s_step_to_rounding(in_groups: Any, mode: str, others: tuple[str, ...]) -> None:
    """Loss, gradients, norm and a course of steps, in float64; models of other forms; and what rank 0 writes."""
    said = in_groups[mode]
    errors = [*said["accumulate 1"].values(), *said["accumulate 2"].values(), *(in_groups[name] for name in others)]
    assert all(error <= 1e-12 for error in errors), errors
    ours, slices = said["losses"]
    assert len(ours) == 6
    assert ours == pytest.approx(slices, rel=1e-10)
    assert said["weights"] <= 1e-8
    assert said["saved"] is True


def test_hsdp_gathers_and_scatters_within_a_group_and_averages_between_them(in_groups: Any) -> None:
    """As rank 0 sees it: of its group's fellow all weights, of the other group's first rank the gradient of its share."""
    said = in_groups["hsdp"]
    sent = {(each["name"], tuple(each.get("ranks", ()))): each for each in said["collectives"]}
    matrices = said["bytes"] - said["vector_bytes"]
    assert {of: each["bytes"] for of, each in sent.items()} == {
        ("allgather_base", (0, 1)): 2 * matrices - said["table_bytes"],
        ("reduce_scatter_base", (0, 1)): matrices,
        ("all_reduce", (0, 1)): 8 * (2 * 4 + 2),  # norms of the matrices' shares, by DTensor
        ("allreduce", (0, 2)): matrices / 2,
        ("allreduce", ()): said["vector_bytes"] + 8,  # the loss
    }


def test_fsdp2_tp_gathers_between_groups_and_adds_up_within_them(in_groups: Any) -> None:
    """What is gathered and scattered is a rank's share of each layer."""
    said = in_groups["fsdp2+tp"]
    sent = {(each["name"], tuple(each.get("ranks", ()))): each["bytes"] for each in said["collectives"]}
    layers = said["bytes"] - said["vector_bytes"] - said["table_bytes"]
    vocabulary, positions = 8 * 64 * 32, 8 * 16 * 32
    products = 2 * 5 * 8 * (8 // 2 * 16 * 32)  # of four pairs, and of embedding and head, in either pass
    assert sent["allgather_base", (0, 2)] == layers + vocabulary / 2 + positions
    assert sent["reduce_scatter_base", (0, 2)] == (layers + vocabulary) / 2 + positions
    assert sent["allreduce", (0, 1)] == products + 8  # and the norm of shares
    assert sent["allreduce", ()] == 8  # the loss


def test_hsdp_averages_between_groups_once_a_step(in_groups: Any) -> None:
    """Of two micro-batches each is scattered within a group."""
    once, twice = (
        {(each["name"], tuple(each.get("ranks", ()))): each["bytes"] for each in said}
        for said in (in_groups["hsdp"]["collectives"], in_groups["accumulating"])
    )
    within = [("allgather_base", (0, 1)), ("reduce_scatter_base", (0, 1))]
    assert twice == {of: (2 if of in within else 1) * nbytes for of, nbytes in once.items()}


def test_hsdp_gathers_in_fp8_what_one_process_casts(in_groups: Any) -> None:
    said = in_groups["gather"]
    assert said["same"].pop("aligned") == [2 * 2 * 4 * 2] * 2
    assert said["same"] == {when: [2 * 4 * 2, 2 * 4 * 2] for when in ("forward", "backward", "widened")}
    assert said["losses"] == pytest.approx(said["one"], rel=4e-3)
    gathers = {each["dtype"]: each for each in said["collectives"] if "gather" in each["name"]}
    assert gathers.keys() == {"uint8", "float32"}  # the tables are gathered in their own
    assert said["asked"] == {"uint8": [2 * said["elements"]] * 2}
    assert (gathers["uint8"]["bytes"], gathers["uint8"]["ranks"]) == (2 * 2 * said["elements"], [0, 1])
    assert said["saved"] is True


def test_hsdp_shares_weights_on_a_host_unless_told_otherwise(in_groups: Any) -> None:
    hosts = in_groups["hosts"]
    assert hosts["a a b b"] == "2"
    assert hosts["a a a a"] == "all 4 ranks are on one host: say how many share the weights, shard=N"
    for other in ("a b a b", "a a a b"):
        assert hosts[other].endswith(
            "give each equally many that follow one another, or say how many share the weights, shard=N"
        )
    assert len(in_groups["refused"]) == 2 * 3
    for said, shard in zip(in_groups["refused"], 2 * (1, 3, 4), strict=True):
        assert said.startswith(f"shard {shard}: of 4 ranks a group is a divisor, more than one and fewer than all")
