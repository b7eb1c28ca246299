"""The source of a user's model: a factory, or a Hugging Face config. No torch, and no user's code.

    source = identify("mymod:make", arguments=("layers=2",))    what a trial holds; None for a preset
    facts = ask(source, tokens=64)                              what planning needs, from a process of its own

models.adopted builds what a source describes.
"""

import contextlib
import functools
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from te_bench import plugins
from te_bench.models import source_files
from te_bench.models.configs import configs

HUB = "hf:"
#: Kernels of PyTorch's scaled_dot_product_attention that a model can be held to: torch.backends.cuda.enable_*_sdp.
PINNED = ("math", "mem_efficient", "flash", "cudnn")
PROBE = "te_bench.models.probe"
TRIED = 64  # tokens of planning's sequence if no length is given, and of any with real numbers
PROBE_S = 300.0  # torch and transformers are imported in 10 s, from a slow disk in a minute

#: Fields of a config.json that affect neither weights nor passes; of labels only the number counts.
_IRRELEVANT = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "label2id", "id2label")

TOO_LARGE = "give it fewer or narrower layers, or take a machine with more memory"


class Refused(ValueError):
    """Raised for a user's model that cannot do something; the message is one sentence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A model's source: an import path with arguments and a hash of its code, or a whole config.

    arguments, config: JSON of an object. inputs and loss: import paths of functions that replace te-bench's own.
    packages: JSON of {distribution: version}: transformers for a config, or what the source files import.
    """

    model: str  # "package.module:factory", or "hf:NAME"
    arguments: str | None = None
    config: str | None = None
    sha256: str | None = None  # of the source files of factory, inputs and loss, and of what they import beside them
    inputs: str | None = None
    loss: str | None = None
    packages: str | None = None

    @property
    def settings(self) -> dict[str, str]:
        """The fields that a trial's problem stores."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def of(cls, settings: Any) -> "Source":
        """Make a Source from an object with the same attributes, such as a StepProblem."""
        return cls(**{name: getattr(settings, name) for name in cls.__dataclass_fields__})


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """A model's properties, found without weights and without a GPU.

    vocab: size of its tokens' vocabulary, 1 if its inputs are no tokens. block: its longest sequence, if it says.
    sequence: the only possible sequence length, if there is one. sdpa: calls of scaled_dot_product_attention in a pass.
    scores: elements of their softmax for one sequence of `tried` tokens. text: it learns from text. manual: it has
    attention of ordinary operators. logits: it maps tokens alone to logits. float32: all trained weights are float32.
    cls: its class's name. blocks: its transformer blocks as an expression of Python on a `model`; "" without blocks.
    head: the name of the head that te.convert replaces with its loss; "" without one.
    """

    vocab: int
    block: int | None
    sequence: int | None
    parameters: int
    sdpa: int
    scores: int
    tried: int
    text: bool
    manual: bool
    logits: bool = False
    float32: bool = True
    cls: str = ""
    blocks: str = ""
    head: str = ""


def identify(
    spec: str, arguments: Sequence[str] = (), inputs: str | None = None, loss: str | None = None
) -> Source | None:
    """Return the source that --model names; None for a preset. Raises ValueError if invalid or contradictory."""
    functions = {"inputs": inputs, "loss": loss}
    own = [path for path in functions.values() if path]
    if spec in configs():
        said = {"--model-args": arguments, "--inputs": inputs, "--loss": loss}
        for flag, value in said.items():
            if value:
                raise ValueError(f"{flag}: {spec} is a model of te-bench's own, which takes none; leave it out")
        return None
    if spec.startswith(HUB) or Path(spec).exists():
        if arguments:
            raise ValueError(
                f"--model-args: {spec} is described by its config.json; change it there, or give a factory"
            )
        name, config = _read_config(spec)
        code = source_files.read(own) if own else None
        packages = source_files.versions(["transformers"]) | dict(code.packages if code else {})
        sha256 = code.sha256 if code else None
        return Source(model=name, config=config, sha256=sha256, **functions, packages=_packages(packages))
    check(spec)
    read = _canonical(read_arguments(arguments)) if arguments else None
    code = source_files.read([spec, *own])
    return Source(model=spec, arguments=read, sha256=code.sha256, **functions, packages=_packages(code.packages))


def is_changed(source: Source) -> bool:
    """Return whether the user's code, of which the source has a hash, is other than when it was identified."""
    paths = [path for path in (None if source.config else source.model, source.inputs, source.loss) if path]
    try:
        return source_files.sha256(paths) != source.sha256
    except ValueError:  # a file is gone, or is no Python while it is edited
        return True


def _packages(versions: Mapping[str, str]) -> str | None:
    return _canonical(versions) if versions else None


def _canonical(value: Mapping[str, Any]) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def check(spec: str) -> None:
    """Raise ValueError, with near matches, for an impossible model name."""
    if spec in configs() or spec.startswith(HUB) or ":" in spec or Path(spec).exists():
        return
    if "/" in spec or spec.endswith(".json"):
        raise ValueError(f"--model {spec}: there is no such folder or file; a model of a hub is {HUB}NAME")
    try:
        plugins.check("model", spec, list(configs()))
    except ValueError as error:
        forms = "package.module:factory, a Hugging Face folder or its config.json, or hf:NAME"
        raise ValueError(f"{error} Or give {forms}.") from None


def read_arguments(said: Sequence[str]) -> dict[str, Any]:
    """Parse KEY=VALUE to {name: int, float, bool or string}. Raises ValueError for any other form."""
    found: dict[str, Any] = {}
    for text in said:
        name, sign, value = text.partition("=")
        if not sign or not name.isidentifier():
            raise ValueError(f"--model-args {text}: give NAME=VALUE, where NAME is a parameter of the factory")
        if name in found:
            raise ValueError(f"--model-args {text}: {name} is given twice; give it once")
        found[name] = _literal(value)
    return found


def _literal(text: str) -> Any:
    def refuse(constant: str) -> Any:
        raise ValueError(constant)

    try:
        value = json.loads(text.lower() if text in ("True", "False") else text, parse_constant=refuse)
    except ValueError:
        return text
    return value if isinstance(value, bool | int | float | str) else text


# ---- a config.json


def _read_config(spec: str) -> tuple[str, str]:
    """Return ("hf:NAME", canonical JSON of the config). Raises ValueError unless transformers could read the config."""
    path = _from_hub(spec.removeprefix(HUB)) if spec.startswith(HUB) else Path(spec)
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise ValueError(f"--model {spec}: the folder has no config.json; give a Hugging Face model's") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"--model {spec}: {file.name} is no JSON that can be read ({error})") from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ValueError(
            f"--model {spec}: {file.name} names no model_type; give the config.json of a transformers model"
        )
    if "auto_map" in config:
        raise ValueError(f"--model {spec}: its code is not in transformers (auto_map); give a factory that makes it")
    if "id2label" in config:
        config["num_labels"] = len(config["id2label"])
    for key in _IRRELEVANT:
        config.pop(key, None)
    name = spec.rpartition("/")[2] if spec.startswith(HUB) else file.resolve().parent.name
    if path == file and file.name != "config.json":
        name = file.stem
    return HUB + name.removeprefix(HUB), _canonical(config)


def _from_hub(name: str) -> Path:
    try:
        from huggingface_hub import hf_hub_download
    except ModuleNotFoundError:
        raise ValueError(f"--model {HUB}{name}: needs the package huggingface_hub: pip install transformers") from None
    logger = logging.getLogger("huggingface_hub")  # it logs each attempt; our message reports the last
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        return Path(hf_hub_download(name, "config.json"))
    except Exception as error:  # whichever error of the network, hub or disk it is, there is no file
        why = on_one_line(str(error))[:200]
        raise ValueError(f"--model {HUB}{name}: the hub gives no config.json ({type(error).__name__}: {why})") from None
    finally:
        logger.setLevel(level)


# ---- the probe


@functools.cache
def ask(source: Source, *, tokens: int) -> Facts:
    """Return a model's facts, found by a process without a GPU. Raises ValueError, one sentence, if it cannot train."""
    question = json.dumps({"source": source.settings, "tokens": tokens})
    code, said, errors = _run_probe(source.model, question)
    answer: Mapping[str, Any] = json.loads(said) if code == 0 and said.strip() else {}
    if "error" in answer:
        raise ValueError(answer["error"])
    if not answer:
        raise ValueError(f"{source.model}: {_end(code, built=bool(said))}{_last_line(errors)}")
    return Facts(**answer)


def _run_probe(model: str, question: str) -> tuple[int, str, str]:
    """Return (exit code, stdout, stderr) of the probe, not waiting for processes that the user's code started.

    The probe leads a session, and whatever is left of it is killed.
    """
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    with (
        tempfile.TemporaryFile("w+", errors="replace") as answer,
        tempfile.TemporaryFile("w+", errors="replace") as log,
    ):
        probe = subprocess.Popen(
            [sys.executable, "-m", PROBE],
            stdin=subprocess.PIPE,
            stdout=answer,
            stderr=log,
            text=True,
            env=environment,
            start_new_session=True,
        )
        try:
            probe.communicate(question, timeout=PROBE_S)
        except subprocess.TimeoutExpired:
            raise ValueError(f"{model}: it was not built within {PROBE_S:g} s") from None
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(probe.pid, signal.SIGKILL)
            probe.wait()
        answer.seek(0)
        log.seek(0)
        return probe.returncode, answer.read(), log.read()


def _end(code: int, *, built: bool) -> str:
    killed = ", for want of memory perhaps" if code == -9 else ""
    what = "its forward pass" if built else "building it"
    return f"{what} ended the process with {'signal' if code < 0 else 'exit code'} {abs(code)}{killed}"


def _last_line(text: str) -> str:
    lines = [line for line in map(on_one_line, text.splitlines()) if line]
    return f": {lines[-1][:200]}" if lines else ""


def lacks(error: ModuleNotFoundError) -> str:
    """Return which package is missing and how to install it; if the error names none, its cause."""
    package, inner, _ = (error.name or "").partition(".")
    if inner:
        return f"needs {error.name}, which the installed {package} lacks"
    if package:
        return f"needs the package {package}: pip install {package}"
    cause: BaseException = error
    while (inside := cause.__cause__ or cause.__context__) is not None:
        cause = inside
    said = on_one_line(str(error))[:200]
    why = "" if cause is error else f" ({type(cause).__name__}: {on_one_line(str(cause))[:200]})"
    return f"a package that it needs is missing or of the wrong version: {said}{why}"


def on_one_line(text: str) -> str:
    """Return the text on one line, without unprintable characters such as a terminal's escapes."""
    return " ".join("".join(c for c in word if c.isprintable()) for word in text.split())
