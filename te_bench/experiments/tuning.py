"""What `te-bench tune` measures: for each kind the shapes as users write them, the backends and the trials."""

import dataclasses
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from te_bench import plugins
from te_bench.experiments import environment, plan
from te_bench.experiments.problems import Settings
from te_bench.experiments.spec import DEVICES, NO_ATTENTION, Experiment, Trial
from te_bench.experiments.suite_trials import alone
from te_bench.experiments.suites import attention as suite
from te_bench.kernels import attention, linear_cross_entropy, measured
from te_bench.kernels.gemm import table
from te_bench.kernels.gemm.table import GemmShape

ATTENTION = re.compile(r"(\d+),(\d+)(?:/(\d+))?,(\d+),(\d+),(causal|full|window=(\d*):(\d*))")
GEMM = re.compile(r"(\d+),(\d+),(\d+)(?:,(fp8)(?:,(block)|(,row)?(,promoted)?))?")
EPILOGUE = re.compile(rf"(\d+),(\d+),(\d+),({table.ACTIVATED}|{table.GRADIENT})")
HEAD = re.compile(r"(\d+),(\d+),(\d+)(?:/(\d+))?")
#: Heads of GPT-2 with 124M, 355M and 1.5B parameters, and of vocabularies from 32 k to 256 k, for 2048 to 32768 tokens.
GPU_HEADS = [
    "12288,768,50257/50304", "12288,1024,50257/50304", "8192,1600,50257/50304", "32768,2048,32000", "2048,4096,128256",
    "8192,4096,128256", "8192,2304,256000",
]  # fmt: skip
CPU_HEADS = ["128,64,500/512"]
CPU_GEMM = "256,512,128"

#: {workload: setting of its problem that names the backend}; for `attention` it is the trial's attention.
SETTINGS = {"gemm": "backend", "linear_cross_entropy": "head"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """Something to tune: the operator whose rows it fills, its default shapes, and its backends."""

    operator: str
    title: str
    parse: Callable[[str], Settings]  # from a --shape; raises ValueError for an invalid one
    defaults: Callable[[bool], list[Settings]]  # the default shapes on a GPU (True) or a CPU
    backends: Callable[[Settings], list[str]]
    holds: Callable[[Any], bool] = lambda problem: True  # whether a row of the operator belongs to this kind
    has_dtype: bool = True  # else the shape states the dtype


def experiment(
    kind: str, device: str | None, shapes: Sequence[str], dtype: str | None, rivals: str | None, rounds: int
) -> Experiment:
    """Return the trials in running order. Raise ValueError for unknown names."""
    if rounds < 1:
        raise ValueError(f"--rounds {rounds}: give 1 or more")
    tuned = KINDS[kind]
    device = device or environment.default_device()
    plugins.check("device", device, list(DEVICES))
    cuda = device == "cuda"
    if dtype is not None and not tuned.has_dtype:
        raise ValueError(f"--dtype {dtype}: for {kind} the shape states the dtype; leave it out")
    precision = dtype or ("bf16" if cuda or not tuned.has_dtype else "fp32")
    plugins.check("dtype", precision, ["fp32", "bf16", "fp16"])
    problems = list({json.dumps(p): p for p in map(tuned.parse, shapes)}.values()) or tuned.defaults(cuda)
    able = [(problem, tuned.backends(problem)) for problem in problems]
    known = list(dict.fromkeys(name for _, backends in able for name in backends))
    names = known if rivals is None else list(dict.fromkeys(n.strip() for n in rivals.split(",") if n.strip()))
    if not names:
        raise ValueError(f"--rivals names none; known: {', '.join(known)}")
    for name in names:
        plugins.check("rival", name, known)
    trials = [
        _trial(tuned.operator, device, problem, name, precision, seed)
        for seed in range(rounds)
        for problem, backends in able
        for name in names
        if name in backends
    ]
    for trial in trials:
        plan.check(trial)
    return Experiment(suite=kind, title=tuned.title, trials=plan.interleave(trials))


def _trial(workload: str, device: str, problem: Settings, name: str, precision: str, seed: int) -> Trial:
    if setting := SETTINGS.get(workload):
        return alone(device, workload, {**problem, setting: name}, NO_ATTENTION, precision, "kernel", seed)
    return alone(device, workload, problem, name, precision, "kernel", seed)


# Attention


def attention_shape(text: str) -> Settings:
    """Return the settings of B,H[/Hkv],T,D,MASK."""
    found = ATTENTION.fullmatch(text.strip())
    if found is None:
        raise ValueError(
            f"--shape {text}: give B,H,T,D,MASK such as 12,12,1024,64,causal or 2,32/8,4096,128,window=255:0"
        )
    batch, heads, kv_heads, length, head_dim, mask, left, right = found.groups()
    settings: Settings = {
        "batch": int(batch),
        "heads": int(heads),
        "length": int(length),
        "head_dim": int(head_dim),
        "causal": mask == "causal",
    }
    if not all(settings[name] for name in ("batch", "heads", "length", "head_dim")):
        raise ValueError(f"--shape {text}: every size must be at least 1")
    if kv_heads is not None:
        if not int(kv_heads) or int(heads) % int(kv_heads):
            raise ValueError(f"--shape {text}: {kv_heads} key heads must divide the {heads} query heads")
        settings["kv_heads"] = int(kv_heads)
    if mask.startswith("window"):
        if not left and not right:
            raise ValueError(f"--shape {text}: a window without limits is the full mask: give full")
        settings |= {"window_left": int(left or -1), "window_right": int(right or -1)}
    return settings


def _attention_backends(problem: Settings) -> list[str]:
    rivals = [name for name in attention.names() if name != attention.AUTO and not attention.in_fp8(name)]
    return [name for name in rivals if suite.can_hold(name, problem)]


# GEMMs, with an epilogue or without


def gemm_shape(text: str) -> Settings:
    """Return the settings of M,N,K in bf16, M,N,K,fp8[,row][,promoted] or M,N,K,fp8,block."""
    found = GEMM.fullmatch(text.strip())
    if found is None:
        raise ValueError(
            f"--shape {text}: give M,N,K such as 12288,3072,768, 12288,3072,768,fp8,row,promoted or "
            "12288,3072,768,fp8,block"
        )
    m, n, k, fp8, block, row, promoted = found.groups()
    sizes: dict[str, Any] = _sizes(text, m=m, n=n, k=k)
    if not fp8:
        return _settings(GemmShape(**sizes, dtype="bf16"))
    scales = block or ("row" if row else "tensor")
    return _settings(GemmShape(**sizes, dtype="e4m3", scales=scales, fast_accum=not (promoted or block)))


def epilogue_shape(text: str) -> Settings:
    """Return the settings of M,N,K,activated or M,N,K,gradient."""
    found = EPILOGUE.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"--shape {text}: give M,N,K,{table.ACTIVATED} or M,N,K,{table.GRADIENT}")
    m, n, k, epilogue = found.groups()
    sizes: dict[str, Any] = _sizes(text, m=m, n=n, k=k)
    return _settings(GemmShape(**sizes, dtype="bf16", epilogue=epilogue))


def _sizes(text: str, **sizes: str) -> dict[str, int]:
    if not all(map(int, sizes.values())):
        raise ValueError(f"--shape {text}: every size must be at least 1")
    return {name: int(size) for name, size in sizes.items()}


def _settings(shape: GemmShape) -> Settings:
    fp8 = shape.scales is not None
    return {name: v for name, v in dataclasses.asdict(shape).items() if v is not None and (fp8 or name != "fast_accum")}


def _gemm_defaults(cuda: bool) -> list[Settings]:
    on_cpu = [gemm_shape(CPU_GEMM), gemm_shape(f"{CPU_GEMM},fp8")]
    return [shape for shape in _shipped() if "epilogue" not in shape] if cuda else on_cpu


def _epilogue_defaults(cuda: bool) -> list[Settings]:
    on_cpu = [epilogue_shape(f"{CPU_GEMM},{name}") for name in (table.ACTIVATED, table.GRADIENT)]
    return [shape for shape in _shipped() if "epilogue" in shape] if cuda else on_cpu


def _shipped() -> list[Settings]:
    return [_settings(shape) for shape in dict.fromkeys(row.problem for row in measured.read(measured.SHIPPED, "gemm"))]


def _gemm_backends(settings: Settings) -> list[str]:
    return table.rivals(table.read_problem(settings))


# Heads


def head_shape(text: str) -> Settings:
    """Return the settings of N,D,VOCAB[/PADDED]."""
    found = HEAD.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"--shape {text}: give N,D,VOCAB or N,D,VOCAB/PADDED such as 12288,768,50257/50304")
    n, d, vocab, padded = found.groups()
    sizes = _sizes(text, n=n, d=d, vocab=vocab, padded=padded or vocab)
    if sizes["padded"] < sizes["vocab"]:
        raise ValueError(f"--shape {text}: {padded} rows are fewer than {vocab} classes")
    return dict(sizes)


KINDS = {
    "attention": Kind(
        operator="attention",
        title="Attention, tuned",
        parse=attention_shape,
        defaults=lambda cuda: [suite.problem(*sizes) for sizes in (suite.GPU_SHAPES if cuda else suite.CPU_SHAPES)],
        backends=_attention_backends,
    ),
    "gemm": Kind(
        operator="gemm",
        title="GEMMs, tuned",
        parse=gemm_shape,
        defaults=_gemm_defaults,
        backends=_gemm_backends,
        holds=lambda shape: shape.epilogue is None,
        has_dtype=False,
    ),
    "epilogue": Kind(
        operator="gemm",
        title="GEMMs with an activation, tuned",
        parse=epilogue_shape,
        defaults=_epilogue_defaults,
        backends=_gemm_backends,
        holds=lambda shape: shape.epilogue is not None,
        has_dtype=False,
    ),
    "head": Kind(
        operator="linear_cross_entropy",
        title="Heads, tuned",
        parse=head_shape,
        defaults=lambda cuda: list(map(head_shape, GPU_HEADS if cuda else CPU_HEADS)),
        backends=lambda _: linear_cross_entropy.names(),
    ),
}
