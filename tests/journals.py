"""Synthetic journals: a ladder like an H200's, every outcome, several seeds, loss curves, hostile names."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from te_bench.experiments.spec import Record, Trial
from te_bench.experiments.store import Plan, Store
from te_bench.reports.group_result import GroupResult, load_report

H200 = "NVIDIA H200"
HOSTILE = "<script>alert(document.title)</script>"
STARTED = "2026-11-20T12:00:00+00:00"

#: attention, padded vocabulary, precision, mode, ms/step, peak GiB: the ladder one H200 gave.
LADDER = (
    ("manual", 50257, "bf16", "eager", 103.8, 22.6),
    ("math", 50257, "bf16", "eager", 99.4, 19.8),
    ("mem_efficient", 50257, "bf16", "eager", 57.9, 12.5),
    ("flash", 50257, "bf16", "eager", 53.1, 12.5),
    ("flash", 50304, "bf16", "eager", 33.8, 12.5),
    ("cudnn", 50304, "bf16", "eager", 32.6, 12.5),
    ("flash", 50304, "bf16", "compile", 27.4, 9.1),
    ("cudnn", 50304, "bf16", "compile-reduce-overhead", 26.8, 9.4),
    ("cudnn", 50304, "bf16", "cudagraph", 26.1, 9.2),
    ("flash", 50304, "fp8", "compile", 29.3, 7.7),
    ("manual", 50257, "fp32", "eager", 214.0, 41.3),
)


def environment(identifier: str = "env-h200", gpu: str | None = H200, **identity: Any) -> dict[str, Any]:
    known = {"device": "cuda" if gpu else "cpu", "gpu": gpu, "driver": "580.159", "cuda": "13.0", "cudnn": "9.19"}
    known |= {"torch": "2.11.0", "triton": "3.6.0", "python": "3.12.11", "cpu": "EPYC 9654", "cores": 16}
    known["code"] = "c0de"
    details = {"git_commit": "0123456789abcdef", "git_dirty": False, "os": "Linux", "memory_bytes": 128 * 2**30}
    packages = {"torch": "2.11.0", "numpy": "2.3.4"}
    return {"id": identifier, "identity": known | identity, "details": {**details, "packages": packages, "gpus": []}}


def trial(workload: str = "train_step", attention: str = "flash", *, device: str = "cuda", **changes: Any) -> Trial:
    """A trial of the workload; names that are not fields of Trial are settings of its problem."""
    problems: dict[str, dict[str, Any]] = {
        "train_step": {"model": "gpt2", "batch": 12, "block": 1024, "vocab": 50257, "padded_vocab": 50304},
        "training": {"model": "char", "batch": 64, "block": 256, "vocab": 65, "padded_vocab": 65, "tokenizer": "char"}
        | {"data": "text:play.txt", "data_sha256": "ab12", "steps": 500, "budget_s": None, "learning_rate": 1e-3},
        "layer": {"layer": "te_layer", "variant": "fair", "dropout": 0.0, "mask": "causal", "hidden": 4096}
        | {"ffn": 16384, "heads": 32, "sequence": 2048, "batch": 4},
        "max_batch": {"model": "gpt2", "block": 1024, "vocab": 50257, "padded_vocab": 50304, "memory_limit_gib": 139},
        "attention": {"batch": 12, "heads": 12, "length": 1024, "head_dim": 64, "causal": True, "dropout": 0.0},
        "attention_numerics": {"batch": 1, "heads": 4, "length": 256, "head_dim": 64, "causal": True, "dropout": 0.0},
    }
    fields = {name: changes.pop(name) for name in tuple(changes) if name in Trial.__slots__}
    problem = problems.get(workload, {}) | changes
    return Trial(workload=workload, device=device, attention=attention, problem=problem, **fields)


def record(of: Trial, where: str = "env-h200", outcome: str = "ok", **changes: Any) -> Record:
    return Record(trial=of, environment=where, outcome=outcome, started_at=STARTED, wall_s=1.5, **changes)


def checked(*quantities: tuple[str, float, float]) -> dict[str, Any]:
    listed = [{"name": name, "error": error, "limit": limit} for name, error, limit in quantities]
    return {"reference": "manual attention, fp32, same weights", "quantities": listed}


def step_record(of: Trial, ms: float, gib: float = 10.0, where: str = "env-h200", **changes: Any) -> Record:
    """Twenty steps within about 1 % of `ms`, the median exactly `ms`."""
    latency = [ms / 1e3 * (1 + 0.01 * math.sin(i)) for i in range(1, 11)]
    latency += [2 * ms / 1e3 - step for step in latency]
    memory = {"peak_allocated_bytes": [gib * 2**30], "peak_reserved_bytes": [1.15 * gib * 2**30]}
    if of.device == "cpu":
        memory = {"peak_rss_bytes": [gib * 2**30]}
    state = {"gpu": 0, "uuid": "GPU-0", "sm_clock_hz": 1.98e9, "temperature_c": 41.0, "power_w": 512.0}
    return record(
        of,
        where,
        samples={"latency_s": latency, "loss": [10.9, 10.4], **memory},
        work={"tokens": 12288, "flop": 1.05e13},
        check=checked(("loss", 2e-5, 1e-3), ("grad transformer.wte.weight", 4e-3, 1e-2)),
        kernels=[f"{of.attention}_fwd_kernel<bf16, 64, 128>", "nvjet_hsh_128x256"],
        device_state=state if of.device == "cuda" else {},
        **changes,
    )


def curve_record(of: Trial, offset: float = 0.0, outcome: str = "ok", stop: int = 500) -> Record:
    """A loss that falls from 4.2 towards 1.4, shifted by `offset`."""
    steps = list(range(0, stop + 1, 10))
    val_steps = list(range(0, stop + 1, 50))

    def loss(step: int) -> float:
        return 1.4 + 2.8 * math.exp(-step / 90) + offset * (1 + math.sin(step / 40))

    samples = {
        "step": [float(s) for s in steps],
        "loss": [loss(s) - 0.05 + 0.04 * math.sin(1.7 * s + 50 * offset) for s in steps],
        "time_s": [0.02 * s for s in steps],
        "val_step": [float(s) for s in val_steps],
        "val_time_s": [0.02 * s for s in val_steps],
        "val_loss": [loss(s) for s in val_steps],
    }
    reason = "loss is NaN at step 210" if outcome == "diverged" else None
    return record(of, outcome=outcome, reason=reason, samples=samples, work={"tokens": 16384, "batch": 64})


def write(
    directory: Path,
    records: Iterable[Record],
    *,
    planned: Iterable[Trial] = (),
    baseline: str | None = None,
    suite: str = "nanogpt",
    title: str = "GPT-2 124M on one GPU",
    body: Mapping[str, Any] | None = None,
    judgement: Mapping[str, Any] | None = None,
) -> Path:
    """A journal of one plan: the records' trials and then `planned`, which have no record."""
    records = list(records)
    body = body or environment()
    trials = {r.trial.id: r.trial for r in records} | {t.id: t for t in planned}
    what = {"suite": suite, "title": title, "environment": body["id"], "baseline": baseline, "started_at": STARTED}
    plan = Plan(**what, trials=tuple(t.to_json() for t in trials.values()), judgement=judgement or {})
    with Store(directory) as store:
        store.add_environment(body)
        store.add_plan(plan)
        for one in records:
            store.add(one)
    return directory


def only_group(directory: Path) -> GroupResult:
    """What a report finds in a run of one group."""
    [result] = load_report([directory]).groups
    return result


def result_of(directory: Path, records: Iterable[Record], **settings: Any) -> GroupResult:
    """What it finds in these."""
    return only_group(write(directory / "run", records, **settings))


def ladder_records(seeds: int = 1, where: str = "env-h200", slower: float = 1.0) -> list[Record]:
    return [
        step_record(
            trial(attention=attention, padded_vocab=vocab, precision=precision, mode=mode, seed=seed),
            ms * slower * (1 + 0.004 * math.sin(3 * seed * ms)),
            gib,
            where,
        )
        for seed in range(seeds)
        for attention, vocab, precision, mode, ms, gib in LADDER
    ]


def baseline_cell() -> str:
    return trial(attention="manual", padded_vocab=50257).cell


#: The longest of each kind of a captured GPT-2 step on an H200, torch 2.11, seconds.
STEP_KERNELS = {
    "nvjet_sm90_tst_192x192_64x4_2x1_v_bz_coopB_TNN": 4.4e-3,
    "void cublasLt::splitKreduce_kernel<32, 16, int, float>": 0.3e-3,
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x64": 2.2e-3,
    "void cudnn::fusion::compute_dot_do_o_specialized<true, 64>(void const*)": 0.25e-3,
    "rows_kernel": 1.1e-3,
    "triton_red_fused__log_softmax_fill_lift_fresh_prepare_softmax_online_slice_15": 0.9e-3,
    "step_kernel": 0.95e-3,
    "void at::native::multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>>": 1.0e-3,
    "_cast_kernel": 2.2e-3,
    "triton_poi_fused__unsafe_view_gelu_3": 0.7e-3,
    "Memset (Device)": 0.05e-3,
}


def ceilings_record(**changes: Any) -> Record:
    """4 TB/s, and 1,100 FP8 TFLOP/s, twice the bf16 ones."""
    of = trial("ceilings", "none", protocol="kernel", copy_bytes=2**31, edge=8192)
    samples = {"copy_s": [1e-3, 1.1e-3, 1e-3], "gemm_bf16_s": [2e-3], "gemm_fp8_s": [1e-3]}
    return record(of, **{"samples": samples, "work": {"copy_bytes": 4_000_000_000, "gemm_flop": 2 * 8192**3}} | changes)


def everything(directory: Path, seeds: int = 3) -> Path:
    """One run with every workload and every outcome."""
    records = [ceilings_record(), *ladder_records(seeds)]
    for one in records[1:]:
        one.work["kernel_s"] = STEP_KERNELS  # type: ignore[index]
    endings = ("unsupported", "oom", "timeout", "crashed", "failed_check", "stopped", "interrupted")
    for outcome in endings:
        failed = trial(attention="flex", mode="compile", padded_vocab=50257, batch=12, note=outcome)
        checks = checked(("dq", 0.3, 0.01)) if outcome == "failed_check" else {}
        records.append(record(failed, outcome=outcome, reason=f"{outcome}: what happened", check=checks))
    records += curves(seeds)
    records += [max_batch_record(*found) for found in (("manual", 60), ("flash", 132), ("cudnn", 136))]
    records += attention_records()
    records += layer_records(seeds)
    for length in (256, 1024):
        numerics = trial("attention_numerics", "manual", length=length, precision="fp16")
        draws = {"error_scale_before": 3e-4, "error_scale_after": 9e-4, "error_sdpa": 4e-4}
        samples = {name: [size * (1 + 0.3 * math.sin(i + length)) for i in range(12)] for name, size in draws.items()}
        records.append(record(numerics, samples=samples, check=checked(("out", 4e-4, 1e-3)) | {"allclose": True}))
    return write(directory, records, planned=[trial(attention="math", mode="compile")], baseline=baseline_cell())


def max_batch_record(attention: str, batch: int) -> Record:
    """Three tries: half of it and itself fit, four more do not."""
    tries: list[dict[str, Any]] = [
        {"batch": tried, "fits": tried <= batch, "peak_allocated_bytes": tried * 2**30 if tried <= batch else None}
        for tried in (batch // 2, batch, batch + 4)
    ]
    return record(trial("max_batch", attention), samples={"max_batch": [float(batch)]}, work={"tries": tries})


#: layer, attention, recipe, mode, ms: what the facts say of one H200 without dropout, causal.
LAYERS = (
    ("plain", "manual", None, "eager", 23.4),
    ("plain_sdpa", "cudnn", None, "compile", 17.2),
    ("te_layer", "cudnn", None, "eager", 18.1),
    ("te_layer", "cudnn", "delayed_scaling", "eager", 13.1),
    ("torchao_tensorwise", "cudnn", "float8_current_scaling", "compile", 13.9),
    ("transformer_engine", "cudnn", "delayed_scaling", "eager", 11.9),
)


def layer_trial(layer: str, attention: str, recipe: str | None, mode: str, **changes: Any) -> Trial:
    fields = {"recipe": recipe, "precision": "fp8" if recipe else "bf16", "mode": mode, "protocol": "quickstart"}
    return trial("layer", attention, layer=layer, **fields, **changes)


def layer_records(seeds: int = 1, **changes: Any) -> list[Record]:
    """Fifty iterations of each layer, and kernels of every kind: 1 ms attention, GEMMs 60 %, norms 20 %, the rest."""
    records = []
    for seed in range(seeds):
        for layer, attention, recipe, mode, ms in LAYERS:
            of = layer_trial(layer, attention, recipe, mode, seed=seed, **changes)
            done = step_record(of, ms * (1 + 0.003 * math.sin(seed * ms)), 2.5)
            kernels = {
                "nvjet_sm90_qqtst_128x256_64x6_2x1_v_bz_TNT": 0.6 * ms / 1e3,
                "_forward_quantized_kernel": 0.2 * ms / 1e3,
                "cudnn_generated_fort_native_sdpa_sm90_flash_bprop": 1e-3,
                "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>": 0.1 * ms / 1e3,
            }
            work = {"tokens": 8192, "flop": 1.03e13, "gemm_flop": 9.9e12, "kernel_s": kernels}
            records.append(dataclasses.replace(done, work=work))
    return records


def curves(seeds: int = 3) -> list[Record]:
    records = []
    for seed in range(seeds):
        bf16, fp8 = (trial("training", precision=precision, seed=seed) for precision in ("bf16", "fp8"))
        records += [curve_record(bf16, 0.02 * seed), curve_record(fp8, 0.05 + 0.02 * seed)]
    records.append(curve_record(trial("training", "manual", precision="fp16"), 0.3, outcome="diverged", stop=200))
    return records


def attention_records() -> list[Record]:
    records = []
    shapes = ((12, 12, 1024, 64, True), (4, 32, 2048, 128, True), (4, 32, 2048, 128, False))
    for batch, heads, length, head_dim, causal in shapes:
        flop = 4 * batch * heads * length**2 * head_dim * (0.5 if causal else 1.0)
        shape = {"batch": batch, "heads": heads, "length": length, "head_dim": head_dim, "causal": causal}
        for kernel, rate in (("mem_efficient", 120e12), ("flash", 240e12), ("cudnn", 410e12)):
            samples = {"forward_s": [flop / rate] * 5, "backward_s": [2.5 * flop / (0.8 * rate)] * 5}
            work = {"forward_flop": flop, "backward_flop": 2.5 * flop}
            checks = checked(("out", 2e-3, 8e-3), ("dq", 5e-3, 9e-3))
            records.append(record(trial("attention", kernel, **shape), samples=samples, work=work, check=checks))
        manual = trial("attention", "manual", **shape)
        records.append(record(manual, outcome="oom", reason="CUDA out of memory: tried to allocate 16 GiB"))
    return records
