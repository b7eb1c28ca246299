"""Forward and backward pass of one transformer layer, after it was held to float64: the quickstart's, or a model's.

The variant "mlp" is the norm and MLP alone, with attention "none". As in the quickstart x and dy are uniform on [0, 1),
(sequence, batch, hidden), x needs no gradient, no optimiser steps and gradients accumulate. Mode cudagraph: both passes,
with the recipe's step for its scales, captured as they are.
samples: latency_s (50), peak_*_bytes (1), on a GPU that counts it energy_j (1).
work: tokens, FLOP and the GEMMs' FLOP of an iteration; on a GPU, but for a graph, held_bytes, allocated between passes; ran
(checks.what_ran); kernel_s, {kernel: seconds an iteration}, on a CPU the own time of each operator; numerics of te_bench's
layers in FP8; on a GPU launches, the kernels of one iteration; in a mode that compiles graph_breaks and recompiles, one of
them the check's, whose x needs a gradient.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import te_bench.models as te
from te_bench import plugins
from te_bench.experiments import timing, trial_model
from te_bench.experiments.checks import attention_rows, gradients, held, large, seeds, tolerances, what_ran
from te_bench.experiments.checks.fp8_emulation import emulate
from te_bench.experiments.checks.quantity import CHECKED_BEFORE, Quantity, judge, relative_error
from te_bench.experiments.checks.timed import Timed
from te_bench.experiments.checks.tolerances import FACTOR, LEFT, SUMMED
from te_bench.experiments.instruments import compilation, energy, memory, profiling
from te_bench.experiments.measurement import Context, Measurement, Unsupported, require
from te_bench.experiments.problems import LayerProblem
from te_bench.experiments.spec import NO_ATTENTION, Trial
from te_bench.kernels import attention
from te_bench.models import decoder_layer
from te_bench.models import quickstart as layers
from te_bench.models.configs import configs
from te_bench.models.quickstart import Layer, LayerConfig
from te_bench.models.quickstart.plain import KernelAttention

WARM_UP = 3  # passes before one is captured


def run(trial: Trial, context: Context) -> Measurement:
    rival, p = layers.load(LayerProblem.of(trial).layer), config_of(trial)
    require_supported(trial, rival, p)
    compilation.begin(trial)
    iteration = Iteration(rival, p, trial.seed, mode=trial.mode)
    check = check_layer(trial, rival, p, iteration) if context.check else CHECKED_BEFORE
    if context.check:
        seeds.require("inputs and weights", trial.seed, functools.partial(_drawn, p), (iteration.x, iteration.dy))
    torch.manual_seed(trial.seed)  # dropout draws the same masks whatever the check drew
    memory.reset(trial.device)
    timed = Timed(iteration)
    latency = timed.samples(timing.quickstart, trial.device)
    peaks = memory.peak(trial.device)
    held.require(peaks, held.of_module(iteration.module, (iteration.x, iteration.dy)))
    samples = {"latency_s": latency, **peaks}
    y = timed.take().cpu()  # on the host it is not counted as held
    work: dict[str, Any] = {"tokens": p.sequence * p.batch, "flop": flop(p), "gemm_flop": gemm_flop(p)}
    work |= compilation.counts(trial)
    if trial.device == "cuda" and trial.mode != "cudagraph":  # a graph's pool holds what a pass made
        work["held_bytes"] = torch.cuda.memory_allocated()
    measurement = Measurement(check=check, work=work, samples=samples)
    if not context.check:  # a gate's later rounds need times and memory alone
        return measurement
    seen = timed.seen(trial.device)
    if not p.dropout and trial.device in tolerances.DEVICES:
        require_left(iteration, y, timed.calls)
    named = dataclasses.replace(trial, mode="compile") if rival.own_attention else trial
    linears = 2 if p.part == "mlp" else what_ran.LINEARS
    asked = what_ran.expected_of_layer(
        trial, linears=linears, theirs=rival.own_attention, emulated=bool(p.settings.get("emulate"))
    )
    measurement = what_ran.require(named, seen, measurement, asked)
    more: dict[str, Any] = {"kernel_s": profiling.kernel_seconds(iteration, trial.device)}
    joules = energy.sample(iteration, trial.device, latency)
    if rival.numerics and trial.recipe:
        more["numerics"] = iteration.numerics()
    return dataclasses.replace(measurement, work={**measurement.work, **more}, samples={**samples, **joules})


def config_of(trial: Trial) -> LayerConfig:
    """Return the trial's layer. Raises ValueError for wrong settings, Unsupported for a model whose layer none builds."""
    p = LayerProblem.of(trial)
    if p.model is None and p.hidden % p.heads:
        raise ValueError(f"hidden {p.hidden} is not a multiple of {p.heads} heads")
    if p.mask not in ("full", "causal"):
        raise ValueError(f"mask {p.mask!r}: full or causal")
    return LayerConfig(
        **{name: getattr(p, name) for name in ("hidden", "ffn", "heads", "sequence", "batch")},
        dropout=float(p.dropout),
        mask=p.mask,
        attention=trial.attention,
        precision=trial.precision,
        device=trial.device,
        recipe=trial.recipe,
        settings=dict(p.recipe_settings),
        part="mlp" if p.variant == "mlp" else "layer",
        **_of_model(p),
    )


def _of_model(p: LayerProblem) -> dict[str, Any]:
    if p.model is None:
        return {}
    plugins.check("model", p.model, list(configs()))
    shape = configs()[p.model].shape
    if (own := (shape.hidden, shape.ffn, shape.heads)) != (p.hidden, p.ffn, p.heads):
        raise ValueError(f"hidden, ffn and heads are {p.hidden}, {p.ffn} and {p.heads}; those of {p.model}: {own}")
    if reason := decoder_layer.unlike(p.model):
        raise Unsupported(f"model {p.model}: {reason}")
    return decoder_layer.settings(p.model)


def require_supported(trial: Trial, rival: Layer, p: LayerConfig) -> None:
    """Raise Unsupported, with the reason, if this machine or this rival cannot run the trial."""
    trial_model.require_device(trial.device)
    if trial.mode in ("compile-blocks", "compile-reduce-overhead"):
        raise Unsupported(f"{trial.mode}: the layer runs eager, compile or cudagraph")
    if trial.mode == "cudagraph" and trial.device == "cpu":
        raise Unsupported("cudagraph: CUDA graphs need an NVIDIA GPU")
    if trial.device == "cpu" and trial.precision == "fp16":
        raise Unsupported("fp16: half-precision training is for GPUs; use bf16 on a CPU")
    if p.part not in rival.parts:
        raise Unsupported(
            f"variant mlp: {LayerProblem.of(trial).layer} has no MLP of its own; choose a variant of the layer"
        )
    if (p.part == "mlp") != (trial.attention == NO_ATTENTION):
        raise Unsupported(f"attention {trial.attention}: the variant mlp computes none, the others compute one")
    if reason := rival.unsupported(p):
        raise Unsupported(reason)
    if p.part != "mlp":
        require(trial.attention, attention.load(trial.attention).unsupported(p.attention_problem))


def gemm_flop(p: LayerConfig) -> int:
    """Return 6 for each weight and token: forward and backward of the four Linears, or of the MLP's two."""
    attention = 0 if p.part == "mlp" else p.hidden * (sum(p.columns) + p.columns[0])
    return p.sequence * p.batch * 6 * (attention + p.hidden * (p.up + p.ffn))


def flop(p: LayerConfig) -> int:
    """Return gemm_flop plus 12 T a token and feature of attention's queries, half of it if causal."""
    if p.part == "mlp":
        return gemm_flop(p)
    return gemm_flop(p) + p.sequence * p.batch * 12 * p.sequence * p.columns[0] // (2 if p.causal else 1)


def draw(p: LayerConfig, seed: int) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Return the plain layer's weights by torch's initialisation, x and dy, all in p.dtype: the same for every rival."""
    torch.manual_seed(seed)
    with torch.device(p.device):
        plain = layers.load("plain").build(p)
        x, dy = (torch.rand(p.sequence, p.batch, p.hidden).to(p.dtype) for _ in range(2))
    return {name: weight.detach().to(p.dtype) for name, weight in plain.named_parameters()}, x, dy


def _drawn(p: LayerConfig, seed: int) -> list[Tensor]:
    weights, x, dy = draw(p, seed)
    return [x, dy, *weights.values()]


class Iteration:
    """One rival with its weights and data: a call is a forward pass in its context and a backward pass.

    wide: compute in float64 what p says, from the same weights and data. Mode cudagraph replays both passes.
    """

    def __init__(self, rival: Layer, p: LayerConfig, seed: int, *, mode: str = "eager", wide: bool = False):
        self.rival, self.p = rival, p
        self.captures = mode == "cudagraph"
        self.graph: Any = None
        self.output: Any = None  # the graph's
        self.checked: dict[str, Tensor] = {}  # on the host: what the check found to be right
        weights, self.x, self.dy = draw(p, seed)
        self.names = tuple(weights)  # not the weights: their copy would count as the rival's memory
        if wide:
            p = dataclasses.replace(p, precision="fp64")
            self.x, self.dy = self.x.double(), self.dy.double()
        trial_model.allow_tf32(p.precision)
        with torch.device(p.device):
            self.module = rival.build(p)
        layers.load_weights(rival, self.module, weights)
        self.context = rival.context(p)
        self.forward: Callable[[Tensor], Tensor] = self.module
        if mode == "compile":
            self.forward = torch.compile(self.module, dynamic=False)

    def __call__(self) -> Any:
        if not self.captures:
            return self.passes(self.x)
        if self.graph is None:
            self.graph, self.output = self._captured(self.x)
        self.graph.replay()
        return self.output

    def passes(self, x: Tensor) -> Tensor:
        """Return the output of one pass; its backward pass adds to the gradients."""
        with self.context():
            y = self.forward(x)
        y.backward(self.dy)
        return y.detach()

    def _captured(self, x: Tensor) -> tuple[Any, Tensor]:
        """Return a CUDA graph of both passes, which adds to the gradients that are there, and its output."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):  # autotuning and library handles must not happen during capture
                self.passes(x)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):  # by default, that of the GPU of the first capture
            y = self.passes(x)
        return graph, y

    def _once(self, x: Tensor) -> Tensor:
        """Return the output of one more pass, by a new graph in mode cudagraph, and leave its gradients alone."""
        self.graph = self.output = None  # it adds to gradients that are let go here
        self.module.zero_grad(set_to_none=True)
        if not self.captures:
            return self.passes(x)
        graph, y = self._captured(x)
        self.module.zero_grad(set_to_none=False)
        if x.grad is not None:
            x.grad.zero_()
        graph.replay()
        return y.clone()

    def results(self, *, keep: bool = False) -> dict[str, Tensor | None]:
        """Return what the layer adds to its residual stream, forward and backward, and every gradient, of one more pass.

        The weight of query, key and value comes in parts; their bias whole, for the key's gradient is 0. The MLP adds
        to nothing. keep: keep output and gradients as `checked`, too.
        """
        x = self.x.clone().requires_grad_()
        y = self._once(x)
        if keep:
            self.checked = {"output": y.cpu(), **self.gradients()}
        y = y.double()
        dx = None if x.grad is None else x.grad.double()
        found: dict[str, Tensor | None] = {"output": y, "dx": dx}
        if self.p.part == "layer":
            found = {"output - x": y - self.x.double(), "dx - dy": None if dx is None else dx - self.dy.double()}
        for name, gradient in layers.plain_gradients(self.rival, self.module, self.names).items():
            if name == "qkv_projection.weight" and gradient is not None:
                columns = [n // self.p.turns for n in self.p.columns]
                parts = gradient.view(self.p.turns, -1, gradient.shape[1]).split(columns, 1)
                found |= {f"grad {name} {part}": rows for part, rows in zip("qkv", parts, strict=True)}
            else:
                found[f"grad {name}"] = gradient
        self.module.zero_grad(set_to_none=True)
        return found

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients that are there, by the plain layer's names, on the host."""
        found = layers.plain_gradients(self.rival, self.module, self.names)
        return {name: gradient.cpu() for name, gradient in found.items() if gradient is not None}

    def numerics(self) -> dict[str, Any]:
        """Return te.numerics of one more pass, eager: counting is no part of what was compiled."""
        with te.record_numerics():
            with self.context():
                y = self.module(self.x)
            y.backward(self.dy)
        return te.numerics(self.module)


def require_left(iteration: Iteration, y: Tensor, calls: int) -> None:
    """Raise CheckFailed unless the last timed pass left the output that was checked, and all calls as many gradients."""
    right, passes = iteration.checked, calls + (WARM_UP if iteration.captures else 0)
    quantities = [Quantity("output, timed", relative_error(y, right.pop("output")), LEFT)]
    for name, found in iteration.gradients().items():
        mean, once = found.double() / passes, right[name].double()
        scale = ((mean * once).sum() / once.square().sum().clamp(min=1e-30)).item()
        quantities.append(Quantity(f"grad {name}, timed", abs(scale - 1), SUMMED))
    judge("what was checked", quantities)


def check_layer(trial: Trial, rival: Layer, p: LayerConfig, iteration: Iteration) -> dict[str, Any]:
    """Hold output, dx and every gradient to the plain layer in float64 with the same weights and mask, without dropout.

    The yardstick is the plain layer at the trial's own precision, eager, with FP8 emulated, and its attention rounded as
    fused kernels round if the trial's is one. The limits are those of training steps (gradients.beside). With dropout
    another layer is checked in place of the timed one, for random masks cannot be compared. Raises CheckFailed.
    """
    if p.dropout:
        p = dataclasses.replace(p, dropout=0.0)
        iteration = Iteration(rival, p, trial.seed, mode=trial.mode)
    gradients.settle(p.recipe, iteration)
    ours = iteration.results(keep=trial.device in tolerances.DEVICES)
    plain = layers.load("plain")
    precision = "bf16" if p.recipe else p.precision
    exact = dataclasses.replace(p, attention="manual", precision=precision, recipe=None, settings={})
    truth = _by_parts(Iteration(plain, exact, trial.seed, wide=True)).results()
    attends = None if trial.attention == NO_ATTENTION else trial_model.attention_of(trial)
    in_fp8 = attends is not None and attention.in_fp8(attends)
    fused = attends not in (None, *gradients.UNFUSED) and not in_fp8
    library = _by_parts(Iteration(plain, exact, trial.seed), as_fused=fused)
    if (recipe := layers.recipe_of(p)) is not None:
        emulate(library.module, recipe, seed=trial.seed)
    yardstick = library.results()
    trial_model.allow_tf32(p.precision)  # the references set it for theirs

    # Others may round more coarsely than the recipe says, and so does FP8 attention than this yardstick.
    alike = (rival.numerics or not p.recipe) and not in_fp8
    known, exactly = ({name: _there(value) for name, value in of.items()} for of in (yardstick, truth))
    quantities, ratios = gradients.beside(ours, known, exactly, p.precision, slack=1.0 if alike else FACTOR)
    if p.recipe:  # others may also multiply more exactly
        weights = [name for name, value in exactly.items() if name.startswith("grad") and value.dim() == 2]
        quantities += gradients.of_emulation((ratios[name] for name in weights), above=rival.numerics)
    return judge("the plain layer, fp64, same weights, mask and data", quantities)


def _by_parts(reference: Iteration, *, as_fused: bool = False) -> Iteration:
    """Let attention go by the heads that share a key if a sequence has too many scores. Return the reference.

    as_fused: round attention as fused kernels round it.
    """
    p = reference.p
    if p.part == "layer":
        module: Any = reference.module
        if as_fused:
            module.attention = KernelAttention(attention_rows.as_fused, p.causal)
        if p.heads * p.sequence**2 > large.LARGE:
            module.attention.forward = large.by_heads(module.attention.forward, axis=2)
    return reference


def _there(x: Tensor | None) -> Tensor:
    assert x is not None, "the reference has every gradient"
    return x
