"""Liger-Kernel's RMSNorm, rotary positions, SwiGLU and linear cross-entropy around PyTorch's products, bf16, in eager mode.

A user's model of transformers is changed by Liger's own patch of its family.

Liger's users replace these parts of a model of transformers and leave it in eager mode, or compile it; its loss waits for
the GPU to count targets, so that a compiler breaks the graph there. Weights are in float32 under autocast, as te-bench
trains them; the head's are cast once a step, where Liger would cast them for each chunk, and their gradient is summed up in
float32.

Source: liger-kernel 0.8.5, transformers/functional.py, transformers/monkey_patch.py, ops/swiglu.py and
ops/fused_linear_cross_entropy.py.
"""

import contextlib
import dataclasses
import functools
import math
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from te_bench.kernels.linear_cross_entropy import Backend, load
from te_bench.models.configs import DecoderConfig
from te_bench.models.rivals import Adoption, Capability, Changed, Rival, _parts, missing

if TYPE_CHECKING:
    from torch import Tensor, nn

    from te_bench.models.decoder import Decoder
    from te_bench.models.parts import AttentionPart, LinearPart, MLPPart, NormPart


#: Model types of transformers whose patch of an instance otherwise changes only globals of its class's module.
PATCHED = ("gemma", "gemma2", "granite", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3", "smollm3")


def unsupported(config: DecoderConfig, device: str, capability: Capability) -> str | None:
    return _lacks(device) or _parts.unlike_llama(config, biases=True)


def _lacks(device: str) -> str | None:
    if reason := missing(["liger_kernel"], "liger-kernel", "liger-kernel"):
        return reason
    return None if device == "cuda" else "needs an NVIDIA GPU"


def body(model: "Decoder", x: "Tensor") -> "Tensor":
    """Compute Decoder.body, (B, T, C) -> (B, T, C), by Liger's kernels."""
    from te_bench.models.parts import AttentionPart, NormPart

    angles = model.angles(x.shape[1])
    assert angles is not None, "unsupported refuses learned positions"
    turns = angles.cos(), angles.sin()
    for part in model.parts():
        y = _norm(x, part.norm)
        x = x + (_attention(y, part, *turns) if isinstance(part, AttentionPart) else _mlp(y, part))
    return _norm(x, NormPart.of(model.tables().norm))


def _norm(x: "Tensor", part: "NormPart") -> "Tensor":
    from liger_kernel.transformers.functional import liger_rms_norm

    y: Tensor = liger_rms_norm(x, part.weight, part.norm.eps)
    return y


def _linear(x: "Tensor", part: "LinearPart") -> "Tensor":
    from torch.nn.functional import linear

    return linear(x, part.weight, part.bias)


def _attention(x: "Tensor", part: "AttentionPart", cos: "Tensor", sin: "Tensor") -> "Tensor":
    from liger_kernel.transformers.functional import liger_rope

    sizes = [heads * part.head_dim for heads in (part.heads, part.groups, part.groups)]
    q, k, v = (t.unflatten(2, (-1, part.head_dim)) for t in _linear(x, part.qkv).split(sizes, 2))
    if part.q_norm is not None and part.k_norm is not None:
        q, k = _norm(q, part.q_norm), _norm(k, part.k_norm)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (B, H, T, D), and (B, G, T, D) twice
    q, k = liger_rope(q, k, cos, sin)
    y = part.module.attention(q, k, v, causal=True, scale=1 / math.sqrt(part.head_dim))
    return _linear(y.transpose(1, 2).flatten(2), part.proj)


def _mlp(x: "Tensor", part: "MLPPart") -> "Tensor":
    """Compute an MLP with gate and up in one GEMM; Liger reads its halves and overwrites them with their gradient.

    Its gradient always has two dimensions (0.8.5).
    """
    from liger_kernel.ops import LigerFusedGateUpSiLUMulFunction

    y = LigerFusedGateUpSiLUMulFunction.apply(_linear(x.flatten(0, 1), part.up), True)
    return _linear(y, part.down).view(x.shape)


def head(config: DecoderConfig) -> Backend:
    """Make Liger's loss, whose GEMMs have the true vocabulary's size."""
    backend = load("liger")

    def gemms(n: int, d: int, padded: int, itemsize: int, rounded: bool) -> tuple[int, int]:
        return backend.gemms(n, config.shape.hidden, config.vocab_size, itemsize, rounded)

    return dataclasses.replace(backend, gemms=gemms)


def build(model: "Decoder") -> None:
    from te_bench.models.decoder import Passes

    def autocast(enabled: bool) -> Any:
        return contextlib.nullcontext()

    model.passes = Passes(body, autocast)
    model.heads = {True: head(model.config), False: load("chunked")}


def unsupported_module(module: "nn.Module", device: str, capability: Capability) -> str | None:
    if reason := _lacks(device):
        return reason
    kind = getattr(getattr(module, "config", None), "model_type", None)
    if kind in PATCHED and type(module).__name__.endswith("ForCausalLM"):
        return None
    return f"it patches causal models of transformers ({', '.join(PATCHED)}), and this is a {type(module).__name__}"


def adopt(module: "nn.Module") -> Changed:
    """Patch the instance as Liger does, but make its changes to transformers' globals last only during calls.

    The check builds the same module without Liger in the same process.
    """
    from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

    home = vars(sys.modules[type(module).__module__])
    before = dict(home)
    _apply_liger_kernel_to_instance(model=module)
    theirs = {name: value for name, value in home.items() if value is not before.get(name)}
    home.update({name: before[name] for name in theirs})
    return Changed(around=functools.partial(_replaced, home, theirs))


@contextlib.contextmanager
def _replaced(names: dict[str, Any], by: Mapping[str, Any]) -> Iterator[None]:
    """Set these names to these values inside the context."""
    before = {name: names[name] for name in by}
    names.update(by)
    try:
        yield
    finally:
        names.update(before)


def code(vocab: int) -> tuple[str, ...]:
    """Return the lines that patch a `model` of transformers."""
    return (
        "from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance",
        "_apply_liger_kernel_to_instance(model=model)  # pip install liger-kernel",
    )


RIVAL = Rival(
    title="Liger",
    packages=("liger-kernel",),
    unsupported=unsupported,
    build=build,
    recipe=None,
    modes=("eager",),
    head=head,
    own_blocks=True,
    kernels=r"^_(block_)?rms_norm_forward_kernel|^_triton_rope|^_swiglu_fused_gate_up_forward",
    adoption=Adoption(unsupported=unsupported_module, build=adopt, code=code),
)
