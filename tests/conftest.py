"""What every test may use; its being here also puts this folder on the import path."""

import contextlib
import gc
import importlib.metadata
import os
import signal
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import interpreter
import pytest

# The processes that tests start find te_bench from any folder, installed or not.
ROOT = str(Path(__file__).resolve().parents[1])
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")]))

# Where there is no GPU, Triton's kernels run in its interpreter, in this process alone: others are as a user has them.
# Triton reads the variable when it is imported, for its own functions, and the knob for others.
if not any(Path("/dev").glob("nvidia[0-9]*")) and os.environ.setdefault("TRITON_INTERPRET", "1") == "1":
    with contextlib.suppress(ImportError):
        from triton import knobs

        knobs.propagate_env = False
        knobs.runtime.interpret = True
        del os.environ["TRITON_INTERPRET"]

# Modules make objects by the hundred thousand and torch's compiler by the million, few of them garbage.
gc.set_threshold(100_000)


# Nothing that tests write is to outlive a loss of power: those of the command line would wait 4,000 times for a disk.
def _written(file: Any) -> None:
    os.fstat(file if isinstance(file, int) else file.fileno())  # a file that is not open is an error, as ever


os.fsync = _written

if "PYTEST_XDIST_WORKER" in os.environ:  # one worker a core already
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # else a process of Inductor's own, which imports torch

# A shell without job control starts what it runs in the background deaf to Ctrl-C, nohup to a terminal's end, and so would
# be all that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


SELDOM = ("other_gpus", "simulations", "site")


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the groups in its own
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What takes minutes and is seldom needed runs where its mark is asked for by name."""
    for mark in SELDOM:
        if mark in config.option.markexpr:
            continue
        left_out = [item for item in items if item.get_closest_marker(mark)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    if "PYTEST_XDIST_WORKER" in os.environ:
        for item in items:
            _group(item)
        items.sort(key=lambda item: not item.get_closest_marker("slow"))  # else a worker may begin with the last alone


def _group(item: pytest.Item) -> None:
    """One worker runs a module's tests that share a fixture: others would make it again, and so does each that runs a
    test of another module in between."""
    fixtures = getattr(item, "_fixtureinfo", None)
    if fixtures and not item.get_closest_marker("xdist_group"):
        definitions = [found[-1] for found in fixtures.name2fixturedefs.values() if found]
        if any(found.scope == "module" for found in definitions):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))


def pytest_collection_finish() -> None:
    """What was imported and collected stays, 700,000 objects: to look for garbage among them took half a second a time."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)  # after the fixtures' own
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """What a module's tests imported and compiled stays too, a million objects in the end: a trial that a test runs in this
    process looks for garbage again and again, 0.1 s each time."""
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """One worker runs a function's parametrisations: pytest-xdist counts what is left by all that it dealt, test by test.

    The groups come in the order of their first tests, not the largest first: how long one takes is not in its size.
    """
    if config.getvalue("dist") != "loadgroup":
        return None
    config.option.loadscopereorder = False
    from xdist.scheduler import LoadGroupScheduling

    class Functions(LoadGroupScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            group: str = super()._split_scope(nodeid)
            return nodeid.partition("[")[0] if group == nodeid else group

    return Functions(config, log)


REASON = 1500  # characters from either end of a failure's reason


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: Any) -> Iterator[None]:
    """Each failure's whole reason once more, and last: of a long log the end is kept, and pytest's summary cuts reasons."""
    yield
    for report in (*terminalreporter.stats.get("error", ()), *terminalreporter.stats.get("failed", ())):
        chain = getattr(report.longrepr, "chain", ())  # an exception after its cause; none where a worker died
        reason = "\n".join(crash.message for _, crash, _ in chain if crash) or str(report.longrepr)
        if len(reason) > 2 * REASON:
            reason = f"{reason[:REASON]}\n[...]\n{reason[-REASON:]}"
        terminalreporter.write_line(f"\n{report.nodeid}, {report.when}:\n{reason}")


def pytest_runtest_setup(item: pytest.Item) -> None:
    # A workload allows TF32 as its trial needs it, for the process, which is the trial's own; here the next test's as well.
    if "torch" in sys.modules:
        sys.modules["torch"].backends.cuda.matmul.allow_tf32 = False
    interpreter.quicken()
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs an NVIDIA GPU")


@pytest.fixture
def no_package(tmp_path: Path) -> Callable[[str], dict[str, str]]:
    """Environment variables under which importing a package says that there is no such one."""

    def without(name: str) -> dict[str, str]:
        folder = tmp_path / f"no_{name}"
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(f'import sys\n\nsys.modules["{name}"] = None\n')
        return {"PYTHONPATH": os.pathsep.join([str(folder), os.environ["PYTHONPATH"]])}

    return without


@pytest.fixture
def no_torch(no_package: Callable[[str], dict[str, str]]) -> dict[str, str]:
    return no_package("torch")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """script("NAME"): the module benchmarks/NAME.py."""
    monkeypatch.syspath_prepend(str(Path(ROOT) / "benchmarks"))
    return importlib.import_module


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backends answer as where Triton compiles: its interpreter does more, float32 for instance, and Gluon has none."""
    import triton

    # Noted at their import, which comes first: Gluon's asks whether the functions that it takes from Triton are interpreted.
    for backend in ("attention.backends.gluon", "gemm.backends.gluon", "gemm.backends.triton"):
        monkeypatch.setattr(f"te_bench.kernels.{backend}.INTERPRETED", False)
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are made and not drawn, where a test says nothing of their looks: each file is an empty SVG."""
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, stream, **_: stream.write(b"<svg />"))


@pytest.fixture
def drawn_once() -> Iterator[None]:
    """Figures are drawn as SVG alone."""
    from svg_alone import svg_alone

    with svg_alone():
        yield


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """A timed call is repeated a few times, where a test says nothing of how often."""
    from te_bench.experiments import timing

    few = {"BENCH_PY_BURN_IN": 1, "BENCH_PY_TIMED": 2, "QUICKSTART_WARM_UP": 1, "QUICKSTART_TIMED": 2}
    for name, calls in (few | {"KERNEL_WARMUP": 1, "KERNEL_MIN": 2, "KERNEL_SECONDS": 0.0}).items():
        monkeypatch.setattr(timing, name, calls)


@pytest.fixture
def plain_heads() -> Iterator[None]:
    """Linear cross-entropy and the tied gradient by a CPU's own formulas: the interpreter takes a second for each."""
    with pytest.MonkeyPatch.context() as patch:  # its own, which a test's undo leaves alone
        for kernels in ("kernels", "tied"):
            patch.setattr(f"te_bench.kernels.linear_cross_entropy.{kernels}.INTERPRETED", False)
        yield


@pytest.fixture(scope="module")
def asked_here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A user's model is looked at in this process, which has imported torch, and not in one of its own; packages once.

    Its modules are forgotten afterwards: another test's module may have the same name, or be missing by it.
    """
    from te_bench.models import probe, sources

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "ask", lambda source, *, tokens: probe.find_out(source, tokens))
        patch.setattr(importlib.metadata, "packages_distributions", cache(importlib.metadata.packages_distributions))
        yield
    folder = tmp_path_factory.getbasetemp()
    for name, module in list(sys.modules.items()):
        if (file := getattr(module, "__file__", None)) and Path(file).is_relative_to(folder):
            del sys.modules[name]


@pytest.fixture
def one_thread() -> Iterator[None]:
    """torch on one thread: a fork of a process that has had OpenMP's others waits for them in vain, for they are not forked.

    Of a real trial's process the tries of the largest batch are the first that computes.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
