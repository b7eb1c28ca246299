"""MLPs of any model by te-bench's kernels: GEMMs and activation in one autograd Function; parameters stay in place.

    y = act(x W1^T + b1) W2^T + b2      W1 may be two Linears, the activated half (gate) and the other (up)

What a module computes is found by trial: a shell of it, with small Linears instead of its own, is compared with the
formula under every activation of the kernels. So a class of any name can be converted, if it computes nothing more.
"""

import contextlib
import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from te_bench.kernels.activation import KINDS
from te_bench.kernels.activation.backends import reference
from te_bench.kernels.activation.recomputed import gradient_and_value
from te_bench.kernels.autograd import once_differentiable
from te_bench.kernels.quantize import Quantized
from te_bench.models import fp8
from te_bench.models.fused.projection import Projection
from te_bench.models.modules.activations import FLOATS, compute_dtype, flatten, is_recorded
from te_bench.models.modules.gathered import turned
from te_bench.models.modules.gemms import NOT_NEEDED, Gemms, of_weight, restore, save_for_backward
from te_bench.models.modules.layernorm_mlp import activate_quantize, activation_backend, activation_grad_quantize
from te_bench.models.modules.linear import Linear, linear_backward
from te_bench.models.modules.plain import are_plain, has_hooks
from te_bench.models.modules.tensor_parallel import Division
from te_bench.models.subclassing import Mixed, mix

#: Names of the first Linears, the activated one first, and of the last: Llama and most others, Phi 3, T5, torchtitan,
#: ViT and CLIP, GPT-2 and nanoGPT.
NAMES = (
    (("gate_proj", "up_proj"), "down_proj"),
    (("gate_up_proj",), "down_proj"),
    (("wi_0", "wi_1"), "wo"),
    (("w1", "w3"), "w2"),
    (("fc1",), "fc2"),
    (("c_fc",), "c_proj"),
    (("wi",), "wo"),
)

ROWS, WIDTH, HIDDEN = 8, 4, 6  # sizes of a shell
SCALES = (1, 30, 3000)  # of its inputs: at the largest, first Linears give +-10000, which reveals clipping


class Form(NamedTuple):
    """The places of an MLP's Linears, and its activation. dropout: the name of a module after the last Linear.

    others: all other modules below it when the form was found.
    """

    first: tuple[str, ...]
    last: str
    kind: str
    dropout: str | None
    others: tuple[nn.Module, ...]


class MLP(Mixed):
    """A mixin before an MLP's class. Its own forward runs if something observes its layers (hooks, LoRA).

    So it does if a module between the Linears was replaced, for dropout there, in calibration, and under torch.compile
    or torch.jit.trace.
    """

    _te_mlp: Form | None = None

    def te_stacks(self) -> list[list[Any]]:
        """Return the group of Linears whose weights multiply as one matrix."""
        return [] if self._te_mlp is None else [[getattr(self, name) for name in self._te_mlp.first]]

    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        form = self._te_mlp
        if form is None:
            return super().forward(x, *args, **kwargs)  # type: ignore[misc]
        first, last = [getattr(self, name) for name in form.first], getattr(self, form.last)
        if args or kwargs or is_recorded() or not can_fuse(self, x, first, last):
            return super().forward(x, *args, **kwargs)  # type: ignore[misc]
        in_fp8 = fp8.current.enabled and isinstance(last, Linear)
        y = (_in_fp8 if in_fp8 else _in_half)(x, form.kind, first, last)
        return y if form.dropout is None else getattr(self, form.dropout)(y)


def can_fuse(module: Any, x: Tensor, first: Sequence[Any], last: Any) -> bool:
    layers = [*first, last]
    if fp8.current.calibrating or x.numel() == 0 or not are_plain(layers, frozen=True):
        return False
    ours = [layer for layer in layers if isinstance(layer, Linear)]
    if fp8.current.enabled and len(ours) not in (0, len(layers)):
        return False
    modes = [divided and divided.mode for divided in map(division, layers)]
    if any(modes) and modes != [*("column" for _ in first), "row"]:
        return False
    form = module._te_mlp
    others = _others(module, form.first, form.last, form.dropout)
    if [id(other) for other in others] != [id(other) for other in form.others]:
        return False
    if any(has_hooks(other) or "forward" in other.__dict__ for other in others):
        return False
    if module.training and any(isinstance(other, nn.Dropout) and other.p > 0 for other in others):
        return False
    return compute_dtype(x) in FLOATS and all(layer.weight.device == x.device for layer in layers)


def division(layer: Any) -> Division | None:
    """Return how a Linear's weight is divided among ranks, or None."""
    divided: Division | None = getattr(layer, "divisions", (None,))[0]
    return divided


def _others(module: nn.Module, first: Sequence[str], last: str, dropout: str | None) -> tuple[nn.Module, ...]:
    """Return all modules below an MLP except its Linears and the dropout after them."""
    known = {*first, last, dropout}
    children = [child for name, child in module._modules.items() if child is not None and name not in known]
    return tuple(other for child in children for other in child.modules())


def _in_half(x: Tensor, kind: str, first: Sequence[Any], last: Any) -> Tensor:
    for layer in (*first, last):
        if isinstance(layer, Linear):
            layer.without_fp8()
    dtype, divided = compute_dtype(x), division(last)
    w2, b2, *others = [t for layer in (last, *first) for t in (layer.weight, layer.bias)]
    cast = [None if t is None else t.to(dtype) for t in (w2, b2 if divided is None else None, *others)]
    if (entry := division(first[0])) is not None:
        x = entry.alone().enter(x.to(dtype))
    y: Tensor = _Half.apply(flatten(x, dtype), kind, *cast).view(*x.shape[:-1], -1)
    if divided is None:
        return y
    y = divided.leave(y)
    return y if b2 is None else y + b2.to(dtype)


def _in_fp8(x: Tensor, kind: str, first: Sequence[Any], last: Any) -> Tensor:
    training = torch.is_grad_enabled()
    up = Projection.of(first[0], [linear.weight for linear in first], 0, None, training, first[1:])
    down = Projection.of(last, [last.weight], 0, None, training)
    assert up.gemms is not None
    gemms = up.gemms._replace(divided=up.gemms.divided and up.gemms.divided.alone()), down.gemms
    tensors = [t for layer in (last, *first) for t in (layer.weight, layer.bias)]
    y = _Fp8.apply(flatten(x, compute_dtype(x)), kind, gemms, (up.w, down.w), training, *tensors)
    return y.view(*x.shape[:-1], -1)


class _Half(torch.autograd.Function):
    """Compute x (M, K), W2, b2, W1, b1 and, if there are two, the other W1 and b1 -> y (M, N), all of one dtype.

    The first GEMMs write side by side into one matrix, which is saved with x; the activation is recomputed.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: str, w2: Tensor, b2: Tensor | None, *first: Any) -> Tensor:
        weights, biases = first[::2], first[1::2]
        h = x.new_empty(len(x), sum(len(w) for w in weights))
        for part, w, b in zip(_columns(h, weights), weights, biases, strict=True):
            _multiply(x, w, b, part)
        y = x.new_empty(len(x), len(w2))
        _multiply(activation_backend(h).forward(h, kind), w2, b2, y)
        ctx.save_for_backward(x, h, w2, *weights)
        ctx.kind = kind
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, h, w2, *weights = ctx.saved_tensors
        need_x, _, need_w2, need_b2, *need_first = ctx.needs_input_grad
        dy = dy.contiguous()
        dh, a = gradient_and_value(activation_backend(h), dy @ w2, h, ctx.kind)
        dw2 = dy.t() @ a if need_w2 else None
        del a
        dx, first = None, []
        for i, (part, w) in enumerate(zip(_columns(dh, weights), weights, strict=True)):
            first += [part.t() @ x if need_first[2 * i] else None, part.sum(0) if need_first[2 * i + 1] else None]
            if need_x:
                dx = part @ w if dx is None else dx.addmm_(part, w)
        return dx, None, dw2, dy.sum(0) if need_b2 else None, *first


def _columns(h: Tensor, weights: Sequence[Tensor]) -> Sequence[Tensor]:
    return h.split([len(w) for w in weights], 1)


def _multiply(x: Tensor, w: Tensor, b: Tensor | None, out: Tensor) -> None:
    if b is None:
        torch.mm(x, w.t(), out=out)
    else:
        torch.addmm(b, x, w.t(), out=out)


class _Fp8(torch.autograd.Function):
    """`_Half` in FP8: x is cast once, and the first weights are cast as one matrix with the first one's scale."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        kind: str,
        gemms: tuple[Gemms, Gemms],
        weights: Sequence[Quantized],
        training: bool,
        w2: Tensor,
        b2: Tensor | None,
        *first: Any,
    ) -> Tensor:
        (fc1, fc2), (q1, q2), biases = gemms, weights, [b for b in first[1::2] if b is not None]
        needed = [training and need for need in ctx.needs_input_grad]
        need_x, need_w1, need_w2 = needed[0], any(needed[7::2]), needed[5]
        n = fc1.quantize(x, "input", rowwise=True, columnwise=need_w1)
        b1 = torch.cat(biases) if biases else None
        h = fc1.fprop(n, q1, x.dtype, b1)
        a = activate_quantize(fc2, h, kind, columnwise=need_w2)
        y = fc2.fprop(a, q2, x.dtype, b2)
        w1_t = of_weight(q1) if need_x else NOT_NEEDED
        w2_t = of_weight(q2) if training else NOT_NEEDED
        save_for_backward(ctx, (h,), (n.by_columns(), a.by_columns(), w1_t, w2_t))
        ctx.gemms, ctx.kind, ctx.sizes = gemms, kind, [len(w) for w in first[::2]]
        ctx.turns = q1.data_t is None, q2.data_t is None
        ctx.dtypes = [None if t is None else t.dtype for t in (w2, b2, *first)]
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (h,), (n_t, a_t, w1_t, w2_t) = restore(ctx)
        fc1, fc2 = ctx.gemms
        need_x, _, _, _, _, need_w2, need_b2, *need_first = ctx.needs_input_grad
        w2_dtype, b2_dtype, *dtypes = ctx.dtypes
        need_w1, need_b1 = any(need_first[::2]), any(need_first[1::2])
        below = need_x or need_w1 or need_b1
        if below and ctx.turns[1]:
            w2_t = turned(w2_t)
        da, dw2, db2 = linear_backward(fc2, dy, a_t, w2_t, (below, need_w2, need_b2), dy.dtype, w2_dtype)
        dx, first = None, [None] * len(dtypes)
        if da is not None:
            db1 = da.new_zeros(h.shape[1], dtype=torch.float32) if need_b1 else None
            rowwise, columnwise = need_x, need_w1 or not need_x
            g = activation_grad_quantize(fc1, da, h, ctx.kind, rowwise=rowwise, columnwise=columnwise, total=db1)
            del da
            if need_w1:
                first[::2] = fc1.wgrad(g, n_t, dtypes[0]).split(ctx.sizes)
            if db1 is not None:
                first[1::2] = [part.to(t) for part, t in zip(db1.split(ctx.sizes), dtypes[1::2], strict=True)]
            if need_x:
                dx = fc1.dgrad(g, turned(w1_t) if ctx.turns[0] else w1_t, dy.dtype)
        first = [d if need else None for d, need in zip(first, need_first, strict=True)]
        return dx, None, None, None, None, dw2, None if db2 is None else db2.to(b2_dtype), *first


def convert(module: Any, undo: contextlib.ExitStack) -> str:
    """Let an MLP compute by the kernels; returns a description. Raises ValueError with the reason if it stays."""
    form = find_form(module)
    mix(module, MLP, undo)
    undo.callback(vars(module).pop, "_te_mlp", None)
    module._te_mlp = form
    return f"products and {form.kind}"


def places(module: nn.Module) -> tuple[tuple[str, ...], str] | None:
    """Return the names of a module's Linears if it looks like an MLP, or None."""
    children = module._modules
    return next((names for names in NAMES if {*names[0], names[1]} <= children.keys()), None)


def find_form(module: nn.Module) -> Form:
    """Find what an MLP computes. Raises ValueError with the reason if no kernel computes it."""
    names = places(module)
    assert names is not None
    first, last = names
    layers = [module._modules[name] for name in (*first, last)]
    for name, layer in zip((*first, last), layers, strict=True):
        if not isinstance(layer, nn.Linear | Linear):
            raise ValueError(f"its {name} is a {type(layer).__name__}, and no Linear")
        if isinstance(layer, Linear) and (layer.return_bias or "weight" not in layer._parameters):
            raise ValueError(f"its {name} is a te.Linear of several outputs or weights")
    biases = [layer is not None and layer.bias is not None for layer in layers[:-1]]
    if any(biases) != all(biases):
        raise ValueError("one of its first Linears has a bias, and the other has none")
    found = _try(module, first, last, all(biases))
    if found is None:
        raise ValueError("it computes another function, or by an activation that no kernel has")
    kind, dropout = found
    return Form(first, last, kind, dropout, _others(module, first, last, dropout))


class _Passed(nn.Module):
    """A stand-in for a dropout that records its input."""

    seen: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x
        return x


@torch.no_grad()
def _try(module: nn.Module, first: tuple[str, ...], last: str, bias: bool) -> tuple[str, str | None] | None:
    """Find the activation with which a shell of the module gives the formula, and the dropout after it; else None.

    The answer must be the same in training and evaluation.
    """
    gated = len(first) == 2
    with torch.random.fork_rng(devices=[]):  # the module's own dropout may draw numbers
        for inner in (HIDDEN,) if gated else (HIDDEN, 2 * HIDDEN):
            kinds = [kind for kind in KINDS if KINDS[kind][1] == (gated or inner > HIDDEN)]
            found = {_try_in(mode, module, first, last, bias, inner, kinds) for mode in (True, False)}
            if found != {None}:
                return found.pop() if len(found) == 1 else None
    return None


def _try_in(
    training: bool,
    module: nn.Module,
    first: tuple[str, ...],
    last: str,
    bias: bool,
    inner: int,
    kinds: Sequence[str],
) -> tuple[str, str | None] | None:
    """Try `kinds` in one mode, with first Linears of `inner` features each; else as `_try`."""
    generator = torch.Generator("cpu").manual_seed(0)

    def draw(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, dtype=torch.float64, device="cpu")

    made: dict[str, Any] = {}
    for name in (*first, last):
        into, out = (HIDDEN, WIDTH) if name == last else (WIDTH, inner)
        made[name] = nn.Linear(into, out, dtype=torch.float64, device="cpu", bias=name == last or bias)
        made[name].weight.copy_(draw(out, into))
    passed = {name: _Passed() for name, child in module._modules.items() if isinstance(child, nn.Dropout)}
    shell = _shell(module, training, made | passed)
    x = torch.cat([scale * draw(1, ROWS, WIDTH) for scale in SCALES], 1)
    try:
        y = shell.forward(x)
    except Exception:  # whatever it raises, it computes something else
        return None
    if not isinstance(y, Tensor) or y.shape != x.shape:
        return None
    h = torch.cat([made[name](x) for name in first], -1)[0]
    for kind in kinds:
        if torch.allclose(y[0], made[last](reference.forward(h, kind)), rtol=1e-6, atol=1e-6):
            return kind, next((name for name, p in passed.items() if p.seen is y), None)
    return None


def _shell(module: Any, training: bool, instead: dict[str, Any] | None = None) -> Any:
    """Copy a module in that mode, with the children `instead`; running it changes no buffer of the module."""
    shell = copy.copy(module)
    shell.training = training
    shell._buffers = {name: b if b is None else b.clone() for name, b in module._buffers.items()}
    shell._modules = dict(module._modules) | (instead or {})
    for name, child in module._modules.items():
        if child is not None and shell._modules[name] is child:
            shell._modules[name] = _shell(child, training)
    return shell
