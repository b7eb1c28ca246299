"""A git repository of small te_bench packages, whose trials spin for as long as their source says: no torch, no second lost.

Each has the parts that a live gate needs of a revision (gate/revision_process.py names them), te_bench's own where they need
no torch.
"""

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import te_bench

OWN = tuple(f"experiments/{name}.py" for name in ("spec", "problems", "run_options", "measurement"))
FILES = {
    "plugins.py": "def load(*names): pass\n",
    "experiments/workloads/__init__.py": "",
    "experiments/plan.py": """
import fnmatch
from te_bench.experiments.spec import Experiment, Trial
from te_bench.experiments.trial import SECONDS, UNTIMED

def resolve(suite, options, *, only=None):
    trials = [
        Trial(workload="training" if name.startswith("training") else "train_step", device=options.device,
              problem={"model": name, **({"budget_s": 1} if name.endswith("budget") else {})}, attention="flash",
              precision="fp32", mode="eager", protocol="once" if name.startswith(UNTIMED) else "bench_py", seed=0)
        for name in SECONDS
    ]
    chosen = [trial for trial in trials if only is None or fnmatch.fnmatch(trial.name, only)]
    return Experiment(suite=suite, title="Spinning", trials=tuple(chosen), baseline=trials[0].cell)
""",
    "experiments/timing.py": "def bench_py(call, device): raise AssertionError('the gate has a clock of its own')\n",
    "experiments/trial.py": """
import os, signal, time
from te_bench.experiments import timing

SECONDS = {seconds}
UNTIMED = ("untimed", "training")
NOTES = {notes!r}

def run(trial, context):
    name = trial.problem["model"]
    seconds = SECONDS[name]
    if seconds == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if seconds == "raises":
        raise RuntimeError("a workload's own reply is missing")
    if seconds == "hangs":
        time.sleep(3600)

    def call():
        until = time.thread_time() + seconds  # the gate does not count the wait for a core
        while time.thread_time() < until:
            pass
        if NOTES:
            with open(NOTES, "a") as file:
                file.write(f"{{os.environ['PYTHONPATH'].split(os.pathsep)[0][-4:]}} {{trial.seed}}\\n")

    timed = name.startswith(UNTIMED) or timing.bench_py(call, trial.device)
    samples = {{}} if timed is True else {{"latency_s": timed}}
    check = {{"asked": context.check}}
    return {{"outcome": "ok", "reason": None, "work_s": 0.0, "check": check, "work": {{}}, "samples": samples, "kernels": [],
            "device_state": {{}}, "of_a_later_schema": 1}}
""",
}


class Repository:
    """repository.commit({"a": 0.002}) is a revision whose trial "a" takes 2 ms a call."""

    def __init__(self, root: Path):
        self.root = root
        root.mkdir()
        self.git("init", "--quiet", "--initial-branch=main")

    def git(self, *arguments: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
        done = subprocess.run(
            ["git", "-C", self.root, *identity, *arguments], check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    def commit(self, seconds: Mapping[str, float | str], *, notes: Path | None = None, **files: str | None) -> str:
        """The hash of a new commit. files: {name: other content, None for none} of FILES, dots and slashes as __."""
        package = self.root / "te_bench"
        shutil.rmtree(package, ignore_errors=True)
        for name in OWN:
            (package / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(Path(te_bench.__file__).parent / name, package / name)
        other = {name.replace("__", "/") + ".py": content for name, content in files.items()}
        for name, content in {"__init__.py": "", "experiments/__init__.py": "", **FILES, **other}.items():
            (package / name).parent.mkdir(parents=True, exist_ok=True)
            if content is not None:
                made = (
                    content.format(seconds=dict(seconds), notes=str(notes or "")) if "{seconds}" in content else content
                )
                (package / name).write_text(made)
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", "-m", f"{dict(seconds)}")
        return self.git("rev-parse", "HEAD")
