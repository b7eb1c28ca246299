"""A memory-bound piece of a step alone: a norm or an activation, one way, with its cast to FP8 or without.

problem: kind and call, of suites.pieces.PIECES; backend, who computes it; m rows and n columns of what comes out of it: of a
gated activation x has 2 n. precision is the dtype of operands and results; FP8 is E4M3 in both layouts by a scale that is
known, and its amax, as delayed scaling has it. A norm's call add_* first adds a branch to a residual stream.
samples: kernel_s of single calls; on a GPU that counts it energy_j (1). work: bytes, of all operands and all results: what
is to be moved at least; a norm's statistics are not counted. In mode compile also graph_breaks and recompiles.
check: each result against float64, by attention's rule; the yardstick is the backend `reference`.
"""

import dataclasses
import functools
import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from te_bench.experiments import trial_model
from te_bench.experiments.checks import kernel_parts, rounding, seeds
from te_bench.experiments.checks.quantity import CHECKED_BEFORE, judge, of_largest
from te_bench.experiments.checks.timed import Timed
from te_bench.experiments.checks.tolerances import ACCUMULATED, EPSILON
from te_bench.experiments.instruments import compilation, profiling
from te_bench.experiments.measurement import CheckFailed, Context, Measurement, require
from te_bench.experiments.problems import PieceProblem
from te_bench.experiments.spec import Trial
from te_bench.experiments.suites.pieces import LIGER, OURS, PLAIN, TORCH
from te_bench.kernels import activation, norm
from te_bench.kernels.quantize import Quantized

EPS = 1e-5
E4M3 = torch.float8_e4m3fn
#: Results by the first word of a call.
NAMES = {"forward": ("y",), "add": ("sum", "y"), "backward": ("dx", "dweight", "dbias")}

#: backend -> its kernels, or on a CPU operators, that tell all its calls. PyTorch makes RMSNorm's gradient of others.
COMPILED = "torch.compile"
KERNELS = {
    TORCH: r"^aten::(native_layer_norm|rms_norm|_fused_rms_norm|gelu)(_backward)?$|^RsqrtBackward0$",
    OURS: r"^_(add_)?(forward|backward)(_cast)?_kernel$|^te_bench::(norm|activation)_",
    LIGER: r"^_((block_)?rms_norm|layer_norm|swiglu\w*)_(forward|backward)",
    COMPILED: kernel_parts.COMPILED,
}

Results = dict[str, Tensor]


def _swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, 1)
    return F.silu(gate) * up


#: kind -> torch's own operator, of x and the norm's parameters; in float64 it is what results are held to.
OPERATORS: dict[str, Callable[..., Tensor]] = {
    "rmsnorm": lambda x, weight: F.rms_norm(x, weight.shape, weight, EPS),
    "layernorm": lambda x, weight, bias: F.layer_norm(x, weight.shape, weight, bias, EPS),
    "swiglu": _swiglu,
    "gelu": functools.partial(F.gelu, approximate="tanh"),
    "gelu_erf": F.gelu,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Given:
    """Operands: x (M, N), (M, 2N) for a gated activation; a norm's weight and bias (N,); dy or the branch (M, N)."""

    x: Tensor
    parameters: tuple[Tensor, ...]
    other: Tensor | None
    scale: Tensor | None = None  # towards E4M3, whose largest the result's largest element becomes

    @property
    def operands(self) -> tuple[Tensor, ...]:
        return tuple(t for t in (self.x, *self.parameters, self.other) if t is not None)


def run(trial: Trial, context: Context) -> Measurement:
    trial_model.require_device(trial.device)
    p = PieceProblem.of(trial)
    compilation.begin(trial)
    given = _drawn(p, trial, trial.seed)
    call = OTHERS.get((p.backend, p.kind), _by_backend)(p, trial, given)
    results = call()
    check = _held_to_float64(p, trial, given, results) if context.check else CHECKED_BEFORE
    if context.check:
        seeds.require("operands", trial.seed, lambda seed: _drawn(p, trial, seed).operands, given.operands)
    work: dict[str, Any] = {"bytes": sum(t.nbytes for t in (*given.operands, *results.values()))}
    del results
    right = functools.partial(_held_to_float64, p, trial, given)
    ran = functools.partial(require_own, p, trial)
    return Timed(call).measured(trial, context, Measurement(check=check, work=work), right, ran)


def require_own(p: PieceProblem, trial: Trial, seen: profiling.Seen, measurement: Measurement) -> Measurement:
    """Return the measurement with its kernels. Raises CheckFailed, without timings, unless the backend's own alone ran."""
    measurement = dataclasses.replace(measurement, kernels=seen.names)
    for name, pattern in KERNELS.items():
        ran = any(re.search(pattern, kernel) for kernel in seen.counts)
        asked = trial.mode == "compile" if name == COMPILED else name == p.backend
        interpreted = asked and trial.device == "cpu" and name in (OURS, LIGER)
        if ran != asked and not interpreted:
            reason = f"asked for {p.backend}, {trial.mode}, but {'' if ran else 'nothing of '}{name} ran"
            raise CheckFailed(reason, dataclasses.replace(measurement, samples={}))
    return measurement


def _drawn(p: PieceProblem, trial: Trial, seed: int) -> Given:
    generator = torch.Generator(trial.device).manual_seed(seed)

    def draw(*size: int) -> Tensor:
        x = torch.randn(size, generator=generator, device=trial.device)
        return x.to(trial_model.DTYPES[trial.precision])

    gated = p.kind in activation.KINDS and activation.KINDS[p.kind][1]
    vectors = {"rmsnorm": 1, "layernorm": 2}.get(p.kind, 0)
    given = Given(
        x=draw(p.m, p.n * (1 + gated)),
        parameters=tuple(draw(p.n) for _ in range(vectors)),
        other=None if p.call.startswith("forward") else draw(p.m, p.n),
    )
    if not p.call.endswith("quantized"):
        return given
    amax = _exact(p, given, given.x.dtype)[_rounded(p)].abs().amax().float()
    return dataclasses.replace(given, scale=torch.finfo(E4M3).max / amax)


def _by_backend(p: PieceProblem, trial: Trial, given: Given) -> Callable[[], Results]:
    """Return the call by a backend of kernels.norm or kernels.activation, compiled in mode compile."""
    machine = trial_model.machine_of(trial.device)
    machine["quantized"] = given.scale is not None
    cast: dict[str, Any] = {}
    if given.scale is not None:
        amax = torch.zeros_like(given.scale)
        cast = {"scale": given.scale, "dtype": E4M3, "rowwise": True, "columnwise": True, "amax": amax}
    owner: Any
    arguments: tuple[Any, ...]
    if p.kind in activation.KINDS:
        owner, arguments = activation.load(p.backend), (given.x, p.kind)
        require(p.backend, owner.unsupported(activation.Problem(**machine)))
        arguments = arguments if given.other is None else (given.other, *arguments)
        options = cast
    else:
        backend = owner = norm.load(p.backend)
        problem = norm.Problem(n=p.n, dtype=trial.precision, kind=p.kind, **machine)
        require(p.backend, backend.unsupported(problem))
        weight, bias = (*given.parameters, None)[:2]
        settings, options = norm.Norm(EPS, kind=p.kind), cast
        if p.call == "backward":
            statistics = backend.forward(given.x, weight, bias, settings)[1:]
            arguments = given.other, given.x, weight, *statistics, settings
        elif p.call.startswith("add"):
            owner = backend.residual
            arguments = given.x, given.other, weight, bias, settings
            options = {**cast, "via" if cast else "dtype": given.x.dtype}
        else:
            arguments = given.x, weight, bias, settings
    function = getattr(owner, p.call)
    function = torch.compile(function, dynamic=False) if trial.mode == "compile" else function
    return lambda: _named(p, function(*arguments, **options), cast.get("amax"))


def _by_operator(p: PieceProblem, trial: Trial, given: Given) -> Callable[[], Results]:
    """Return the call by OPERATORS in the trial's precision, with gradients by autograd."""
    operator = OPERATORS[p.kind]
    if p.call == "forward":
        return lambda: _named(p, operator(given.x, *given.parameters))
    leaves = [t.detach().requires_grad_() for t in (given.x, *given.parameters)]
    y = operator(*leaves)
    return lambda: _named(p, torch.autograd.grad(y, leaves, given.other, retain_graph=True))


def _by_liger(p: PieceProblem, trial: Trial, given: Given) -> Callable[[], Results]:
    """Return the call of what LigerFusedGateUpSiLUMulFunction is made of. Source: liger-kernel 0.8.5, ops/swiglu.py."""
    require(p.backend, None if importlib.util.find_spec("liger_kernel") is not None else "pip install liger-kernel")
    from liger_kernel.ops.swiglu import swiglu_fused_gate_up_backward, swiglu_fused_gate_up_forward

    if p.call == "forward":
        return lambda: _named(p, swiglu_fused_gate_up_forward(given.x)[1])
    return lambda: _named(p, swiglu_fused_gate_up_backward(given.x, given.other))


#: (backend, kind) -> what makes its call; any other is a backend of kernels.norm or kernels.activation.
OTHERS = {**{(TORCH, kind): _by_operator for kind in OPERATORS}, (LIGER, "swiglu"): _by_liger}


def _names(p: PieceProblem) -> tuple[str, ...]:
    return NAMES[p.call.partition("_")[0]]


def _rounded(p: PieceProblem) -> str:
    return "dx" if p.call.startswith("backward") else "y"


def _named(p: PieceProblem, found: Any, amax: Tensor | None = None) -> Results:
    """Return a call's results by name, without statistics; of FP8 both layouts and the amax."""
    named: Results = {}
    for name, value in zip(_names(p), found if type(found) is tuple else (found,), strict=False):
        if isinstance(value, Quantized):
            assert amax is not None
            named |= {name: value.data, f"{name}, turned": value.data_t, "amax": amax}
        elif value is not None:
            named[name] = value
    return named


def _exact(p: PieceProblem, given: Given, dtype: torch.dtype = torch.float64) -> Results:
    """Return the results by OPERATORS in that dtype, before any cast."""
    x, *parameters = (t.detach().to(dtype) for t in (given.x, *given.parameters))
    other = None if given.other is None else given.other.to(dtype)
    if not p.call.startswith("backward"):
        x = x if other is None else x + other
        return dict(zip(_names(p), (x, OPERATORS[p.kind](x, *parameters))[-len(_names(p)) :], strict=True))
    leaves = [t.requires_grad_() for t in (x, *parameters)]
    gradients = torch.autograd.grad(OPERATORS[p.kind](*leaves), leaves, other)
    return dict(zip(_names(p), gradients, strict=False))


def _held_to_float64(p: PieceProblem, trial: Trial, given: Given, found: Results) -> dict[str, Any]:
    """Hold each result to FlashAttention's rule, and its scale and rows. Raises CheckFailed."""
    exact = _exact(p, given)
    known = _by_backend(dataclasses.replace(p, backend=PLAIN), dataclasses.replace(trial, mode="eager"), given)()
    if given.scale is not None:
        cast = exact[_rounded(p)]
        exact |= {f"{_rounded(p)}, turned": cast.t(), "amax": cast.abs().amax()}
    assert {name: x.dtype for name, x in found.items()} == {name: x.dtype for name, x in known.items()}
    quantities = []
    for name, truth in exact.items():
        in_fp8 = found[name].dtype == E4M3
        value, yardstick = (_wide(of[name], given.scale) for of in (found, known))
        precision = "fp8" if in_fp8 else trial.precision
        floor = (EPSILON[precision] + ACCUMULATED) * truth.abs().max().item()
        quantities.append(of_largest(name, value, truth, yardstick, floor))
        if truth.dim():
            quantities += rounding.quantities(name, value, truth, yardstick, precision)
    return judge("fp64 of the same operands", quantities)


def _wide(x: Tensor, scale: Tensor | None) -> Tensor:
    return x.double() / scale.double() if x.dtype == E4M3 and scale is not None else x.double()
