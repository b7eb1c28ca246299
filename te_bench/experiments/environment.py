"""Describe what a result depends on besides its trial: machine, driver, packages and code. Does not import torch.

`identity` is hashed into the environment id, half of a record's done-key. `details` (serial numbers, git) is only
recorded, so a sweep can continue on another machine of the same kind. A verdict on losses allows more kinds: `of_losses`.
"""

import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import subprocess
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from te_bench.experiments import host
from te_bench.experiments.spec import digest
from te_bench.kernels import measured
from te_bench.models import rivals

PACKAGES = (
    "torch",
    "triton",
    "numpy",
    "datasets",
    "tokenizers",
    "safetensors",
    "scipy",
    "transformers",
    "nvidia-ml-py",
)
#: Packages whose kernels te-bench can run, besides those of rivals.
KERNELS = ("flash-attn-4",)
#: Variables that choose kernels, make launches wait or change how memory is allocated: of torch, CUDA's libraries and NCCL.
VARIABLES = (
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TORCH_BLAS_PREFER_CUBLASLT",
    "PYTORCH_TUNABLEOP_ENABLED",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUBLASLT_WORKSPACE_SIZE",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "TORCH_COMPILE_DISABLE",
    "TORCHDYNAMO_DISABLE",
    "TORCHINDUCTOR_COORDINATE_DESCENT_TUNING",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NCCL_P2P_DISABLE",
    "NCCL_P2P_LEVEL",
    "NCCL_NVLS_ENABLE",
)
#: Beginnings of others' names: Transformer Engine's, and those of torch.compile's choice by measured times.
PREFIXES = ("NVTE_", "TORCHINDUCTOR_MAX_AUTOTUNE")
#: Properties of the GPUs, which their owner can set or which differ within a model.
OF_GPUS = ("power_limit_w", "max_sm_clock_hz")
#: Properties of a GPU and its host, also in each record's `device_state`. They change times, but no loss: the GPU draws the
#: weights and computes, with kernels that packages ship compiled; what the CPU computes (batches, a Llama's rotary
#: frequencies) is bit-identical on all CPUs. A user's model must guarantee the same for its own code.
OF_TIMES = ("driver", "cpu", "cores", *OF_GPUS)
#: The folders whose code can change a result; code for reports and the command line cannot.
MEASURING = ("kernels", "models", "training", "experiments")


def capture(
    device: str,
    gpus: Sequence[dict[str, Any]] = (),
    *,
    by_table: Collection[str] = ("gemm",),
    losses: bool = False,
) -> dict[str, Any]:
    """Return {"id", "identity", "details"} of this machine for trials on `device`: "cpu", or "cuda" with the chosen `gpus`.

    by_table: the operators for which the table of measured times chooses the backend; gemm counts on a GPU only. losses:
    whether the trials are judged by their losses, see `of_losses`. Raise ValueError for GPUs of different models, whose
    results would share one id.
    """
    models = sorted({gpu["name"] for gpu in gpus})
    if len(models) > 1:
        raise ValueError(f"--gpus: a run needs GPUs of one model, these are {', '.join(models)}; name those of one")
    cuda = device == "cuda"
    torch = _torch_build()
    gpu = gpus[0]["name"] if cuda and gpus else None
    identity = {
        "device": device,
        "gpu": gpu,
        "cuda": torch.get("cuda") if cuda else None,
        "cudnn": _version("nvidia-cudnn-cu13") or _version("nvidia-cudnn-cu12") if cuda else None,
        "torch": torch.get("version"),
        "triton": _version("triton"),
        "kernels": _listed(_versions(_kernels()), " ") if cuda else None,
        "variables": _listed(_variables(), "=") if cuda else None,
        "python": platform.python_version(),
        "driver": gpus[0]["driver"] if cuda and gpus else None,
        **{name: _of_all(gpus, name) if cuda else None for name in OF_GPUS},
        "cpu": measured.machine_name("cpu"),
        "cores": host.cores(),
        "threads": None if cuda else _threads(),
        "code": code_hash(),
    }
    operators = [name for name in sorted(by_table) if cuda or name != "gemm"]
    if own := measured.users_choices(operators, measured.machine_name(device, gpu)):
        identity["measured_times"] = digest(own)
    details = {
        "os": _os_name(),
        "kernel": platform.release(),
        "memory_bytes": host.memory_bytes(),
        "packages": _versions((*PACKAGES, *_kernels())),
        "gpus": list(gpus),
        **_git(),
    }
    found = {"id": digest(identity), "identity": identity, "details": details}
    return of_losses(found) if losses else found


def of_losses(machine: dict[str, Any]) -> dict[str, Any]:
    """Return the machine's environment for losses: OF_TIMES of a GPU and its host is recorded, but not in the identity.

    One study may thus run on hosts that differ in OF_TIMES: each record names its host, and step times are compared within a
    host. On a CPU the identity is unchanged, because the CPU computes the losses.
    """
    identity = dict(machine["identity"])
    if identity["device"] != "cuda":
        return machine
    details = {**machine["details"], **{name: identity.pop(name) for name in OF_TIMES}}
    return {"id": digest(identity), "identity": identity, "details": details}


def of_times(machine: Mapping[str, Any]) -> dict[str, Any]:
    """Return OF_TIMES of a captured machine, as in a record's `device_state`; the driver is None on a CPU."""
    known = {**machine["details"], **machine["identity"]}
    return {name: known[name] for name in OF_TIMES}


def _kernels() -> tuple[str, ...]:
    of_rivals = (package for name in rivals.names() for package in rivals.load(name).packages)
    return tuple(dict.fromkeys((*KERNELS, *of_rivals)))


def _versions(packages: Sequence[str]) -> dict[str, str]:
    return {name: version for name in packages if (version := _version(name))}


def _variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name in VARIABLES or name.startswith(PREFIXES)}


def _listed(values: Mapping[str, str], sign: str) -> str | None:
    return ", ".join(f"{name}{sign}{value}" for name, value in sorted(values.items())) or None


def _of_all(gpus: Sequence[Mapping[str, Any]], name: str) -> float | str | None:
    """Return the property that the GPUs share, or all that differ."""
    values = sorted({gpu[name] for gpu in gpus if gpu.get(name) is not None})
    return " and ".join(f"{value:g}" for value in values) if len(values) > 1 else values[0] if values else None


def nvidia_gpus() -> list[dict[str, Any]]:
    """Return the GPUs that NVML sees, [] without NVML or a driver. Never touches CUDA."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no library or no driver
        return []
    driver = pynvml.nvmlSystemGetDriverVersion()
    gpus = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        gpus.append(
            {
                "index": index,
                "name": pynvml.nvmlDeviceGetName(handle),
                "uuid": pynvml.nvmlDeviceGetUUID(handle),
                "driver": driver,
                "memory_bytes": pynvml.nvmlDeviceGetMemoryInfo(handle).total,
                "capability": _capability(handle),
                "max_sm_clock_hz": _try(pynvml.nvmlDeviceGetMaxClockInfo, handle, 1, scale=1e6),
                "max_memory_clock_hz": _try(pynvml.nvmlDeviceGetMaxClockInfo, handle, 2, scale=1e6),
                "power_limit_w": _try(pynvml.nvmlDeviceGetPowerManagementLimit, handle, scale=1e-3),
            }
        )
    return gpus


def _capability(handle: Any) -> list[int] | None:
    """Return major and minor compute capability; None if the driver does not tell."""
    import pynvml

    try:
        return list(pynvml.nvmlDeviceGetCudaComputeCapability(handle))
    except pynvml.NVMLError:
        return None


def visible_gpus() -> list[dict[str, Any]]:
    """Return the GPUs that an inherited CUDA_VISIBLE_DEVICES allows, in its order; all GPUs if it is not set.

    As in CUDA, the list ends at the first entry that is no GPU or repeats one, and "" allows none. An index counts GPUs by
    PCI bus, as NVML and batch schedulers do; CUDA's own default order is the fastest first.
    """
    gpus = nvidia_gpus()
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return gpus
    visible: list[dict[str, Any]] = []
    for entry in map(str.strip, listed.split(",")):
        named = [g for g in gpus if entry == str(g["index"]) or (entry[:4] == "GPU-" and g["uuid"].startswith(entry))]
        if len(named) != 1 or named[0] in visible:
            break
        visible += named
    return visible


def no_cuda() -> str | None:
    """Return why torch could not use a GPU, whether or not one is present; None if it could."""
    build = _torch_build()
    if build["version"] and not build["cuda"]:
        return (
            f"torch {build['version']} is built without CUDA; install one that is not: https://pytorch.org/get-started"
        )
    return None if build["version"] else "needs the package torch: pip install torch"


def names_mig() -> str | None:
    """Return a sentence if CUDA_VISIBLE_DEVICES names a slice of a GPU, which te-bench cannot use; else None."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if not any(entry.strip().startswith("MIG-") for entry in listed.split(",")):
        return None
    return f"CUDA_VISIBLE_DEVICES={listed}: MIG slices are not supported; name whole GPUs, or give --device cpu"


def default_device() -> str:
    """Return "cuda" if there is a GPU that torch can use, otherwise "cpu". Raise ValueError for a slice of a GPU."""
    if why := names_mig():
        raise ValueError(why)
    return "cuda" if visible_gpus() and not no_cuda() else "cpu"


def gpu_state(uuid: str) -> dict[str, Any]:
    """Return the present clocks, temperature, power and throttling of one GPU; {} if they cannot be read."""
    handle = _handle(uuid)
    if handle is None:
        return {}
    import pynvml

    clocks = _clocks(handle)
    return {
        "uuid": uuid,
        "sm_clock_hz": clocks.sm_clock_hz,
        "memory_clock_hz": _try(pynvml.nvmlDeviceGetClockInfo, handle, 2, scale=1e6),
        "temperature_c": _try(pynvml.nvmlDeviceGetTemperature, handle, 0),
        "power_w": _try(pynvml.nvmlDeviceGetPowerUsage, handle, scale=1e-3),
        "throttle_reasons": clocks.throttle_reasons,
    }


def memory_in_use(uuid: str) -> float | None:
    """Return the bytes of a GPU's memory that processes hold, without the driver's own; None if NVML does not tell."""
    handle = _handle(uuid)
    if handle is None:
        return None
    import pynvml

    return _try(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle, pynvml.nvmlMemory_v2).used)


def energy(uuid: str) -> float | None:
    """Return the joules that a GPU has used since its driver was loaded; None if it has no counter."""
    handle = _handle(uuid)
    if handle is None:
        return None
    import pynvml

    return _try(pynvml.nvmlDeviceGetTotalEnergyConsumption, handle, scale=1e-3)


@dataclass(frozen=True, slots=True)
class Clocks:
    """A GPU's SM clock and throttle reasons (nvml.h, nvmlClocksEventReasons*); None: not reported."""

    sm_clock_hz: float | None = None
    throttle_reasons: int | None = None


def clocks_of(uuid: str) -> Callable[[], Clocks]:
    """Return a fast reader of one GPU's clocks; finding the GPU, which is slow, is done here. Reads None without NVML."""
    handle = _handle(uuid)
    return Clocks if handle is None else lambda: _clocks(handle)


def _clocks(handle: Any) -> Clocks:
    import pynvml

    reasons = _try(pynvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
    return Clocks(
        sm_clock_hz=_try(pynvml.nvmlDeviceGetClockInfo, handle, 1, scale=1e6),
        throttle_reasons=None if reasons is None else int(reasons),
    )


def _handle(uuid: str) -> Any | None:
    """Return NVML's handle of a GPU; None without the library, a driver or that GPU."""
    import pynvml

    try:
        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetHandleByUUID(uuid)
    except pynvml.NVMLError:
        return None


def of_revision(machine: dict[str, Any], package: Path | None, commit: str) -> dict[str, Any]:
    """Return `capture`'s answer for the te_bench package of a commit, as a gate runs it: on a CPU with one thread.

    package: None for another repository's commit, whose commands run with their own number of threads.
    """
    identity = {**machine["identity"], "code": commit if package is None else code_hash(package)}
    if package is not None and identity["device"] == "cpu" and not os.environ.get("OMP_NUM_THREADS"):
        identity["threads"] = 1
    details = {**machine["details"], "git_commit": commit, "git_commit_time": None, "git_dirty": False}
    return {"id": digest(identity), "identity": identity, "details": details}


def code_hash(package: Path | None = None) -> str:
    """Return a hash of a te_bench package's source files that can change a result, committed or not; default: this one."""
    root = package or Path(__file__).resolve().parents[1]
    total = hashlib.sha256()
    found = (p for folder in MEASURING for kind in ("*.py", "*.json") for p in (root / folder).rglob(kind))
    for path in sorted(p for p in found if p.is_file()):  # an editor's lock is a link to nothing
        total.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()[:16]


def _torch_build() -> dict[str, str | None]:
    """Return torch's version and CUDA version, read from its version.py without importing torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return {"version": None, "cuda": None}
    source = Path(spec.submodule_search_locations[0]) / "version.py"
    text = source.read_text() if source.exists() else ""
    version = re.search(r"__version__ = '([^']+)'", text)
    cuda = re.search(r"^cuda[^=]*= '([^']+)'", text, re.MULTILINE)
    return {"version": version[1] if version else _version("torch"), "cuda": cuda[1] if cuda else None}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _threads() -> int:
    """Return the number of threads that torch uses on a CPU; its builds with MKL ask that first."""
    asked = (os.environ.get(name, "").strip() for name in ("MKL_NUM_THREADS", "OMP_NUM_THREADS"))
    return next((int(one) for one in asked if one.isascii() and one.isdecimal() and int(one) > 0), host.cores())


def _os_name() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", platform.platform())
    except OSError:
        return platform.platform()


def _git() -> dict[str, Any]:
    """Return commit, its time (UTC, ISO 8601) and dirty flag of this package's checkout.

    All are None without a checkout. The time is the committer's, which orders a history like its commits.
    """
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return {"git_commit": None, "git_commit_time": None, "git_dirty": None}
    commit = _git_output(root, "rev-parse", "HEAD")
    seconds = _git_output(root, "show", "--no-patch", "--format=%ct", "HEAD")
    status = _git_output(root, "status", "--porcelain", "--untracked-files=no")
    return {
        "git_commit": commit,
        "git_commit_time": datetime.fromtimestamp(int(seconds), UTC).isoformat() if seconds else None,
        "git_dirty": None if status is None else bool(status),
    }


def _git_output(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _try(read: Callable[..., float], *arguments: Any, scale: float = 1) -> float | None:
    """Return a reading in SI units; None if the GPU or its driver does not offer it."""
    import pynvml

    try:
        return read(*arguments) * scale
    except pynvml.NVMLError:
        return None
