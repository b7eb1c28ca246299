"""The step by one table as a CUDA graph: simulated on a CPU, and in every mode on a GPU."""

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from table_adamw_cases import CURRENT, DELAYED, OPTIM, a_batch, a_moved_step, a_step, losses, weights
from test_train import MODES, five_steps, gpu_batch
from torch._dynamo.utils import counters

from te_bench.models import cost
from te_bench.models import recipe as recipes
from te_bench.models.adopt import adopt
from te_bench.models.modules.linear import Linear
from te_bench.models.zoo.gpt import CONFIGS, GPT
from te_bench.training import resume
from te_bench.training.evaluation import evaluate
from te_bench.training.optimizer import TableAdamW
from te_bench.training.step import Optim, TrainStep

pytestmark = pytest.mark.usefixtures("plain_heads")


# A captured step, simulated: the graph makes gradients of its own, and at a replay nothing but what it recorded runs


class Graph:
    """What CUDA's graph does to a step: `recording` runs nothing for good; `replay` writes where the capture wrote."""

    step: TrainStep
    device: torch.device | None = None  # the current one, where the step says which
    warm: Sequence[torch.Tensor] = ()  # gradients of before the capture, whose memory is somebody else's by then

    @contextlib.contextmanager
    def recording(self, _: object, stream: Any = None, capture_error_mode: str = "global") -> Iterator[None]:
        step, table = self.step, self.step.table
        assert self.device == step.device
        assert stream is not None, "PyTorch's own stream is on the GPU of the process's first capture"
        assert stream.device == step.device
        assert capture_error_mode == "global", "one process has no thread of NCCL's to allow for"
        modules = [m for m in step.model.modules() if isinstance(m, Linear) and m._state is not None]
        tables = [t for m in modules for both in (m._state.forward, m._state.backward) for t in both.written]
        copies = [] if table is None else table.copies.values()
        tensors = [*step._state(), *step.model.buffers(), *(c.leaf for c in copies if c.fp8 is None), *tables]
        before = [t.detach().clone() for t in tensors]
        with torch.random.fork_rng([]):
            yield
        for tensor, value in zip(tensors, before, strict=True):
            tensor.data.copy_(value)
        for gradient in self.warm:
            gradient.fill_(torch.nan)  # whoever still looks here gets what others keep there by now

    def replay(self) -> None:
        step, table = self.step, self.step.table
        assert step._inputs is not None
        if table is None:
            step.optimizer.zero_grad(set_to_none=False)  # the graph's own
            step._loss.copy_(step._backward(*step._inputs))  # type: ignore[union-attr]
            step._norm.copy_(step.grad_norm)  # type: ignore[union-attr,arg-type]
            step._update()
            return
        holders, clip, fresh = table.gradient_holders(), step._clip, table._fresh
        own = [holder.grad for holder in holders]
        table.zero_grad(set_to_none=True)

        def clip_there() -> None:
            for holder, buffer in zip(holders, own, strict=True):
                if buffer is not None:
                    buffer.copy_(holder.grad)  # type: ignore[arg-type]
                    holder.grad = buffer
            clip()

        step._clip = clip_there  # type: ignore[method-assign]
        loss = step._backward(*step._inputs)
        step._update()
        step._clip = clip  # type: ignore[method-assign]
        step._loss.copy_(loss)  # type: ignore[union-attr]
        step._norm.copy_(step.grad_norm)  # type: ignore[union-attr,arg-type]
        table._fresh, table._versions = fresh, table._seen()  # Python sees nothing of a replay, nor do versions


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> Callable[[TrainStep], TrainStep]:
    graph = Graph()
    nothing = contextlib.nullcontext

    class Stream:
        def __init__(self) -> None:
            self.device = graph.device

        def wait_stream(self, other: object) -> None: ...

    @contextlib.contextmanager
    def on(device: torch.device) -> Iterator[None]:
        graph.device = device
        yield
        graph.device = None

    for name, value in {
        "device": on,
        "Stream": Stream,
        "current_stream": Stream,
        "stream": lambda _: nothing(),
        "CUDAGraph": lambda: graph,
        "current_device": lambda: 0,
        "default_generators": (torch.Generator(),),
        "graph": graph.recording,
        "reset_peak_memory_stats": lambda: None,
        "max_memory_allocated": lambda: 1,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)

    def make(step: TrainStep) -> TrainStep:
        graph.step, step.captured = step, True
        if step.table is None:
            return step
        table = step.table = step.optimizer = step._table_adamw("triton")
        release_gradients = table.release_gradients

        def release_but_leave() -> None:
            """What is recorded runs here, so what it looks up must be there; nobody else may have it."""
            graph.warm = [p.grad for p in table._table.parameters]  # type: ignore[union-attr]
            release_gradients()
            assert all(p.grad.is_meta for p in table._table.parameters)  # type: ignore[union-attr]

        monkeypatch.setattr(table, "release_gradients", release_but_leave)
        return step

    return make


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.parametrize("more", [{}, {"halved": True, "states": "bf16"}], ids=["float32", "few bits"])
@pytest.mark.parametrize(("precision", "recipe"), [("bf16", CURRENT), ("fp8", DELAYED)])
def test_a_captured_step_trains_as_the_eager_one(precision, recipe, more, captured, monkeypatch):
    """After three steps that warm up, at the first batch, of which nothing stays."""
    one: dict[str, Any] = {"n_layer": 1, **more}
    step = captured(a_step(precision, "triton", recipe=recipe, head="chunked", **one))
    before = weights(step)
    loss, found = step.gradients(*a_batch())
    assert all(torch.equal(a, b) for a, b in zip(weights(step), before, strict=True))
    assert all(g.isfinite().all() for g in found.values())
    eager = a_step(precision, "triton", recipe=recipe, head="chunked", **one)
    curves = [losses(s, 3) for s in (step, eager)]
    assert loss == curves[0][0]
    assert curves[0] == curves[1]
    assert all(torch.equal(a, b) for a, b in zip(weights(step), weights(eager), strict=True))
    assert curves[0][0] != curves[0][1]
    assert step.grad_norm is not None
    assert eager.grad_norm is not None
    assert step.grad_norm.item() == pytest.approx(eager.grad_norm.item(), rel=1e-6)
    monkeypatch.setattr(TableAdamW, "_refresh", None)  # nothing is cast outside of the graph
    losses(step, 2)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("optimizer", [None, "triton"])
def test_a_capture_leaves_buffers_scales_and_random_numbers_as_they_were(optimizer, captured):
    """So the captured step makes of the first batch what the eager one makes."""
    step, eager = captured(a_moved_step(optimizer)), a_moved_step(optimizer)
    curves = []
    for each in (step, eager):
        torch.manual_seed(1)
        curves.append(losses(each, 3))
    assert curves[0] == curves[1]
    found, wanted = step.model.state_dict(), eager.model.state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("optimizer", [None, "triton"])
def test_a_capture_keeps_the_moments_that_are_there(optimizer, captured, tmp_path):
    """A step that loads a checkpoint and is captured then goes on as the one that was saved."""
    trained = a_step("bf16", optimizer, n_layer=1)
    losses(trained, 3)
    resume.save(trained, tmp_path / "at", 3)
    step = captured(a_step("bf16", optimizer, n_layer=1))
    assert resume.load(step, tmp_path / "at") == 3
    assert losses(step, 3) == losses(trained, 3)
    assert all(torch.equal(a, b) for a, b in zip(weights(step), weights(trained), strict=True))


@pytest.fixture
def llama() -> Any:
    """With a tied head, and a weight that no pass reaches. Imported before `captured` takes torch's classes away."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True, **sizes)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).train()
    model.idle = torch.nn.Parameter(torch.ones(2, 4))
    return model


def test_a_capture_that_reaches_other_parameters_than_the_pass_before_is_refused(llama, captured):
    """As LayerDrop does, which draws anew in each pass."""
    own, passes = llama.model.norm.forward, []

    def forward(x: torch.Tensor) -> torch.Tensor:
        passes.append(1)
        return own(x) if len(passes) <= 3 else x

    llama.model.norm.forward = forward
    model = adopt(llama)
    step = captured(TrainStep(model, Optim(), precision="bf16", mode="eager", optimizer="triton"))
    with pytest.raises(ValueError, match="the captured pass reached other parameters than the one before it"):
        step(*adopted_batch("cpu"))


def adopted_step(module: Any, precision: str, device: str, mode: str = "eager") -> TrainStep:
    choice = recipes.DelayedScaling(amax_history_len=4) if precision == "fp8" else None
    model = adopt(copy.deepcopy(module).to(device), recipe=choice, parts="all")
    assert model.module.model.te_fuses({"input_ids": torch.zeros(1, 16, dtype=torch.int64, device=device)})
    return TrainStep(model, Optim(learning_rate=1e-2), precision=precision, mode=mode, optimizer="triton")


def adopted_batch(device: str) -> list[torch.Tensor]:
    tokens = torch.randint(96, (2, 33), generator=torch.Generator().manual_seed(1)).to(device)
    return [tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_a_captured_step_of_transformers_llama_trains_as_the_eager_one(precision, llama, captured):
    """In FP8 its weights side by side share a state, which the first pass makes."""
    batch = adopted_batch("cpu")
    step, eager = captured(adopted_step(llama, precision, "cpu")), adopted_step(llama, precision, "cpu")
    curves = [[s(*batch).item() for _ in range(3)] for s in (step, eager)]
    assert curves[0] == curves[1]
    assert curves[0][-1] < curves[0][0]
    assert torch.equal(step.model.module.idle, llama.idle)
    assert "module.idle" not in step.gradients(*batch)[1]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_captured_large_llama_trains_bit_for_bit_as_one_with_both_layouts_of_its_weights(
    llama: Any, captured: Callable[[TrainStep], TrainStep], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its stacked weights are cast by the update, inside of the graph, where the others are by the pass."""
    batch, curves = adopted_batch("cpu"), []
    for elements in (2**60, 0):
        monkeypatch.setattr(cost, "ONCE", elements)
        step = captured(adopted_step(llama, "fp8", "cpu"))
        curves.append([step(*batch).item() for _ in range(3)])
    assert curves[0] == curves[1]
    assert curves[0][-1] < curves[0][0]


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "large"), [("bf16", False), ("fp8", False), ("fp8", True)])
def test_a_graph_of_transformers_llama_has_the_eager_steps_losses(precision, large, llama, monkeypatch):
    monkeypatch.setattr(cost, "ONCE", 0 if large else 2**60)
    batch = adopted_batch("cuda")
    step, eager = (adopted_step(llama, precision, "cuda", mode) for mode in ("cudagraph", "eager"))
    loss = step.gradients(*batch)[0]  # captures
    assert eager.gradients(*batch)[0] == pytest.approx(loss, rel=1e-3)
    curves = [[s(*batch).item() for _ in range(3)] for s in (step, eager)]
    assert curves[0] == pytest.approx(curves[1], rel=1e-4 if precision == "bf16" else 5e-3)
    assert curves[0][-1] < curves[0][0]
    assert torch.equal(step.model.module.idle, llama.idle.cuda())


# Compiled


@pytest.mark.slow
def test_a_compiled_step_is_one_graph_whatever_is_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies come and go in the modules around what is compiled, which sees them always.

    Without Inductor: what it makes of a training step, test_train.py has.
    """
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    counters.clear()
    eager, compiled = (
        a_step("fp8", recipe=DELAYED, head="chunked", mode=mode, n_layer=1) for mode in ("eager", "compile")
    )
    wanted = losses(eager, 6)
    found = losses(compiled, 3)
    evaluate(compiled.model, iter([a_batch()]), "fp8")
    for k in range(3, 6):
        compiled.set_rate(2.0**-10 * (1 + k % 3))
        found.append(compiled(*a_batch(k)).item())
    assert found == pytest.approx(wanted, rel=2e-3)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


# On a GPU


def on_gpu(
    precision: str, recipe: str, mode: str, optimizer: str | None, head: str | None, states: str | None = None
) -> TrainStep:
    """states: with bf16 weights."""
    torch.manual_seed(0)
    config = dataclasses.replace(CONFIGS["tiny"], vocab_size=250)
    found = recipes.load(recipe) if precision == "fp8" else None
    attention = "mem_efficient" if precision == "fp32" else "flash"  # FlashAttention-2 has no float32
    model = GPT(config, attention=attention, padded_vocab_size=256, recipe=found, head=head).cuda()
    if states:
        model.halve()
    optim = Optim(learning_rate=1e-3, grad_clip=0.3)
    return TrainStep(model, optim, precision=precision, mode=mode, optimizer=optimizer, states=states)


@pytest.mark.gpu
@pytest.mark.parametrize("states", ["bf16", "fp8"])
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_a_captured_step_in_few_bits_trains_as_the_eager_one(precision: str, states: str) -> None:
    """Whose random bits are of the same steps; what warms up takes none of them."""
    eager, step, plain = (
        on_gpu(precision, DELAYED, mode, "triton", "chunked", of)
        for mode, of in (("eager", states), ("cudagraph", states), ("eager", None))
    )
    wanted, found, float32 = five_steps(eager), five_steps(step), five_steps(plain)
    assert found == pytest.approx(wanted, rel=1e-3 if precision == "bf16" else 1e-2)
    assert found == pytest.approx(float32, rel=2e-2)
    assert step.table is not None
    assert step.table.state["step"]["seed"] == torch.initial_seed()
    assert {p.dtype for p in step.model.parameters() if p.dim() > 1} == {torch.bfloat16}


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", [None, "triton"])
def test_a_graph_goes_on_from_a_checkpoint_that_was_loaded_before_it(optimizer: str | None, tmp_path: Path) -> None:
    trained, step = (on_gpu("bf16", CURRENT, mode, optimizer, "chunked") for mode in ("eager", "cudagraph"))
    five_steps(trained)
    resume.save(trained, tmp_path / "at", 5)
    assert resume.load(step, tmp_path / "at") == 5
    for each in (trained, step):
        each(*gpu_batch(1))
    for p, other in zip(step.model.parameters(), trained.model.parameters(), strict=True):
        for name, moment in trained.optimizer.state[other].items():
            torch.testing.assert_close(step.optimizer.state[p][name].float(), moment.float(), rtol=0.05, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("precision", "recipe", "head"),
    [("fp32", CURRENT, None), ("bf16", CURRENT, None), ("bf16", CURRENT, "chunked")]
    + [("fp8", recipe, head) for recipe in (DELAYED, CURRENT) for head in ("chunked", "fp8")],
)
def test_every_mode_trains_as_the_plain_eager_step(precision: str, recipe: str, head: str | None, mode: str) -> None:
    step = on_gpu(precision, recipe, mode, "triton", head)
    batch = gpu_batch(0)
    before = weights(step)
    for _ in range(4):  # delayed scaling's way to its scales
        loss, found = step.gradients(*batch, records=True)
    assert all(torch.equal(a, b) for a, b in zip(weights(step), before, strict=True))
    assert (found["transformer.wte.weight"][250:] == 0).all()
    norm = sum(g.double().square().sum().item() for g in found.values()) ** 0.5
    assert norm == pytest.approx(0.3, rel=0.01)
    ours, plain = five_steps(step), five_steps(on_gpu(precision, recipe, "eager", None, None))
    exact = precision != "fp8" and head != "fp8"
    assert loss == pytest.approx(ours[0], rel=1e-4 if exact else 2e-3)
    assert ours == pytest.approx(plain, rel=2e-3 if exact else 2e-2)
    assert ours[0] - ours[-1] > 0.02
    assert ours[2] == pytest.approx(ours[3], rel=1e-4 if exact else 5e-3)
    assert (step.model.transformer.wte.weight[250:] == 0).all()  # type: ignore[union-attr]
    assert step.table is not None
    for master, found_copy in step.table.copies.items():
        if found_copy.fp8 is None:
            assert torch.equal(found_copy.leaf, master.bfloat16())
        else:
            assert found_copy.leaf.isnan().all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.parametrize(
    ("recipe", "accumulate", "blocks"),
    [(CURRENT, 1, None), (DELAYED, 2, "fused")],
)
def test_a_captured_step_goes_on_in_fp8_where_bf16_ended_as_the_eager_one(
    recipe: str, accumulate: int, blocks: str | None, captured: Callable[[TrainStep], TrainStep], tmp_path: Path
) -> None:
    """Bit for bit, whatever the passes before left in what the graph reads: copies, scales, moments, rate and count."""
    optim = dataclasses.replace(OPTIM, accumulate=accumulate)
    one: dict[str, Any] = {"n_layer": 1, "recipe": recipe, "head": "chunked", "optim": optim, "blocks": blocks}
    trunk = a_step("bf16", "triton", **one)
    losses(trunk, 2)
    resume.save(trunk, tmp_path / "at", 2)
    curves = []
    for step in (captured(a_step("fp8", "triton", **one)), a_step("fp8", "triton", **one)):
        step.set_rate(0.1)
        step.gradients(*a_batch(1), records=True)
        assert resume.load(step, tmp_path / "at", begin_fp8=True) == 2
        assert all(torch.equal(a, b) for a, b in zip(weights(step), weights(trunk), strict=True))
        for _ in range(4):
            step.gradients(*a_batch(), records=True)
        assert all(torch.equal(a, b) for a, b in zip(weights(step), weights(trunk), strict=True))
        curves.append([*losses(step, 3), *map(torch.Tensor.tolist, weights(step))])
    assert curves[0] == curves[1]
