"""What a user's model is to a trial: told without running its code, and asked in a process of its own."""

import io
import json
import logging
import time
from importlib.metadata import version
from pathlib import Path

import psutil
import pytest
from driving import eventually
from own_models import MODULE

from te_bench.experiments.problems import StepProblem
from te_bench.experiments.spec import Trial
from te_bench.models import sources

CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 32}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def known(spec: str, *arguments: str, **functions: str) -> sources.Source:
    source = sources.identify(spec, arguments, **functions)
    assert source is not None
    return source


def test_a_factory_is_known_by_its_path_its_arguments_and_a_hash_and_nothing_of_it_runs(here: Path) -> None:
    (here / "told.py").write_text("raise RuntimeError\ndef make(): ...")
    source = known("told:make", "layers=2", "name=a")
    assert source.settings.keys() == {"model", "arguments", "sha256"}
    assert source.model == "told:make"
    assert json.loads(str(source.arguments)) == {"layers": 2, "name": "a"}
    assert known("told:make", "name=a", "layers=2") == source


def test_the_hash_is_of_all_files_that_the_factory_has_beside_it(here: Path) -> None:
    package = here / "mine"
    package.mkdir()
    for name, text in {
        "__init__": "",
        "model": "from .parts import part\nimport beside, json",
        "parts": "part = 1",
    }.items():
        (package / f"{name}.py").write_text(text)
    (here / "beside.py").write_text("")
    hashes = [known("mine.model:make").sha256]
    for changed in (package / "parts.py", here / "beside.py", package / "__init__.py"):
        changed.write_text("part = 2")
        hashes.append(known("mine.model:make").sha256)
    assert len(set(hashes)) == 4
    (here / "other.py").write_text("")
    assert known("mine.model:make").sha256 == hashes[-1]


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def test_the_hash_is_of_packages_beside_and_of_what_lies_by_a_factory_of_another_folder(here, monkeypatch):
    for folder in (here, here / "elsewhere"):
        write(
            folder,
            {
                f"{folder.name}_made.py": "from mylayers.block import W\nimport sibling, torch",
                "mylayers/__init__.py": "",
                "mylayers/block.py": "from . import deep",
                "mylayers/deep.py": "",
                "sibling.py": "",
            },
        )
        for changed in ("mylayers/__init__.py", "mylayers/block.py", "mylayers/deep.py", "sibling.py"):
            before = known(f"{folder.name}_made:make").sha256
            (folder / changed).write_text((folder / changed).read_text() + "\nW = 2")
            assert known(f"{folder.name}_made:make").sha256 != before, changed
        # The second is found by PYTHONPATH, and from another folder.
        monkeypatch.syspath_prepend(here / "elsewhere")
        (here / "nowhere").mkdir(exist_ok=True)
        monkeypatch.chdir(here / "nowhere")


def test_a_package_s_folder_without_an_init_is_part_of_it(here: Path) -> None:
    write(here, {"mine/__init__.py": "", "mine/deep/model.py": "from .part import W", "mine/deep/part.py": "W = 1"})
    before = known("mine.deep.model:make").sha256
    write(here, {"mine/deep/part.py": "W = 2"})
    assert known("mine.deep.model:make").sha256 != before


def test_versions_of_installed_packages_are_held_and_their_files_are_not(here, monkeypatch):
    site = here / "venv" / "lib" / "site-packages"
    write(site, {"blocks_of_others/__init__.py": "", "own_dist-1.0.dist-info/METADATA": "Name: own-dist\nVersion: 1.0"})
    write(site, {"own_dist-1.0.dist-info/top_level.txt": "blocks_of_others"})
    monkeypatch.syspath_prepend(site)
    write(here, {"told.py": "import torch, numpy, json, blocks_of_others\nfrom scipy.stats import norm"})
    first = known("told:make")
    assert json.loads(str(first.packages)) == {
        "own-dist": "1.0",
        **{name: version(name) for name in ("numpy", "scipy")},
    }
    (site / "blocks_of_others" / "__init__.py").write_text("a = 1")
    assert known("told:make") == first
    (site / "own_dist-1.0.dist-info" / "METADATA").write_text("Name: own-dist\nVersion: 1.1")
    second = known("told:make")
    assert second.sha256 == first.sha256
    assert json.loads(str(second.packages))["own-dist"] == "1.1"


def test_a_config_holds_the_version_of_transformers(here: Path) -> None:
    (here / "config.json").write_text(json.dumps(CONFIG))
    (here / "told.py").write_text("import scipy")
    of_transformers = {"transformers": version("transformers")}
    assert json.loads(str(known("./config.json").packages)) == of_transformers
    both = known("./config.json", loss="told:loss")
    assert json.loads(str(both.packages)) == of_transformers | {"scipy": version("scipy")}


def test_a_config_is_the_model_wherever_its_folder_is(here: Path) -> None:
    for name, more in {"a": {}, "b": {"transformers_version": "5.0", "dtype": "bfloat16"}}.items():
        (here / name).mkdir()
        (here / name / "config.json").write_text(json.dumps(CONFIG | more))
    first, second, file = known("a"), known("./b"), known("a/config.json")
    assert first == file
    assert (first.model, second.model) == ("hf:a", "hf:b")
    assert first.config == second.config
    assert json.loads(str(first.config)) == CONFIG


def test_labels_count(here: Path) -> None:
    (here / "config.json").write_text(json.dumps({"model_type": "vit", "id2label": {"0": "cat", "1": "dog"}}))
    assert json.loads(str(known("./config.json").config)) == {"model_type": "vit", "num_labels": 2}


def test_a_trial_holds_a_source_and_gives_it_back(here: Path) -> None:
    (here / "told.py").write_text("")
    source = known("told:make", "layers=2", loss="told:loss")
    problem = {"block": 8, "vocab": 64, "padded_vocab": 64, "batch": 1, **source.settings}
    trial = Trial(workload="train_step", device="cpu", problem=problem, attention="own")
    assert StepProblem.of(Trial.from_json(json.loads(json.dumps(trial.to_json())))).source == source
    assert StepProblem.of(Trial.from_json(trial.to_json() | {"problem": {**problem, "sha256": None}})).source is None


def test_a_preset_comes_from_nowhere() -> None:
    assert sources.identify("gpt2") is None


@pytest.mark.parametrize(
    ("said", "value"),
    [
        ("3", 3),
        ("-2.5e-3", -2.5e-3),
        ("true", True),
        ("False", False),
        ("gelu", "gelu"),
        ("[1, 2]", "[1, 2]"),
        ("NaN", "NaN"),
        ("null", "null"),
        ("", ""),
        ("a=b", "a=b"),
    ],
)
def test_arguments_are_literals(said: str, value: object) -> None:
    found = sources.read_arguments([f"x={said}"])["x"]
    assert (type(found), found) == (type(value), value)


@pytest.mark.parametrize(
    ("spec", "arguments", "sentence"),
    [
        ("nothing", (), "unknown model 'nothing'.*package.module:factory, a Hugging Face folder"),
        ("path/to/config.json", (), "there is no such folder or file; a model of a hub is hf:NAME"),
        ("nosuch:make", (), "no module nosuch in"),
        ("told:make it", (), "give package.module:function"),
        ("broken:make", (), r"broken.py: line 1: "),
        ("told:make", ("layers",), "give NAME=VALUE"),
        ("told:make", ("a=1", "a=2"), "a is given twice"),
        ("gpt2", ("a=1",), "gpt2 is a model of te-bench's own"),
        (".", (), "no config.json"),
        ("folder", ("a=1",), "described by its config.json"),
        ("folder", (), "names no model_type"),
        ("remote", (), "not in transformers"),
        ("torn.json", (), "no JSON that can be read"),
    ],
)
def test_what_is_no_model_is_refused_in_a_sentence(spec, arguments, sentence, here):
    (here / "told.py").write_text("")
    (here / "broken.py").write_text("def make(:")
    (here / "torn.json").write_text("{")
    for name, config in {"folder": {}, "remote": {"model_type": "x", "auto_map": {}}}.items():
        (here / name).mkdir()
        (here / name / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=sentence):
        sources.identify(spec, arguments)


def test_a_model_is_asked_in_a_process_of_its_own_that_ends_with_all_it_has_started(here: Path) -> None:
    start = "    child = subprocess.Popen(['sleep', '60'])\n    pathlib.Path('child').write_text(str(child.pid))\n"
    started = f"def starts(layers):\n{start}    return make(layers)\n"
    (here / "asked.py").write_text(f"import pathlib, subprocess\nprint('hello'){MODULE}\n{started}")
    begun = time.monotonic()
    facts = sources.ask(known("asked:starts", "layers=2"), tokens=8)
    assert time.monotonic() - begun < 55
    assert facts == sources.Facts(
        vocab=64, block=None, sequence=None, parameters=21248, sdpa=2, scores=2 * 2 * 8 * 8, tried=8, text=True,
        manual=False, logits=True, cls="Model", blocks="model.blocks",
    )  # fmt: skip
    child = int((here / "child").read_text())
    assert eventually(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == "zombie", 5.0)


def test_a_model_that_ends_its_process_is_refused_and_steers_no_terminal(here: Path) -> None:
    said = "print('\\x1b[31mthe\\aend', file=sys.stderr)"
    (here / "ended.py").write_text(f"import os, sys\ndef make():\n  {said}\n  os._exit(7)")
    with pytest.raises(ValueError, match=r"ended:make: building it ended the process with exit code 7: \[31mtheend$"):
        sources.ask(known("ended:make"), tokens=8)


def test_a_model_that_ends_its_process_in_its_forward_pass_is_told_so(here: Path) -> None:
    model = "class M(torch.nn.Embedding):\n  def forward(self, x):\n    os._exit(3)\ndef make():\n  return M(4, 4)\n"
    (here / "exits.py").write_text(f"import os\nimport torch\n{model}")
    with pytest.raises(ValueError, match=r"^exits:make: its forward pass ended the process with exit code 3$"):
        sources.ask(known("exits:make"), tokens=8)


def test_a_hub_that_gives_nothing_is_told_of_in_one_sentence_alone(monkeypatch):
    hub, said = pytest.importorskip("huggingface_hub"), io.StringIO()

    def give(*_: object) -> None:
        logging.getLogger("huggingface_hub.utils._http").warning("Retrying in 1s [Retry 1/5].")
        raise ConnectionError("no\x1b[31m such host")

    monkeypatch.setattr(hub, "hf_hub_download", give)
    logger = logging.getLogger("huggingface_hub")
    monkeypatch.setattr(logger, "handlers", [logging.StreamHandler(said)])
    with pytest.raises(
        ValueError, match=r"hf:nobody/none: the hub gives no config.json \(ConnectionError: no\[31m such"
    ):
        sources.identify("hf:nobody/none")
    assert not said.getvalue()
    logger.warning("of something else")
    assert said.getvalue() == "of something else\n"
