"""Ctrl-C where Python itself drops it."""

import os
import subprocess
import sys
from pathlib import Path

from driving import IDLE, PLANTED, rows, te_bench

PROGRAM = """
import signal, time
import te_bench.cli

class Dropping:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)

Dropping()
time.sleep(30)
"""


def test_a_ctrl_c_within_a_finaliser_arrives_again() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=20)
    assert done.stderr.strip().endswith("KeyboardInterrupt")
    assert "ignored" not in done.stderr


SWEEP = f"""
import signal, sys

sys.path.insert(0, {str(PLANTED.parent)!r})
import te_bench_planted
from te_bench import cli
from te_bench.experiments import runner

class Dropping:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)

start = runner.start_child

def start_and_drop(call):
    start(call)
    Dropping()

if __name__ == "__main__":
    runner.start_child = start_and_drop
    cli.main()
"""


def test_a_sweep_ends_by_a_ctrl_c_that_was_dropped(tmp_path: Path) -> None:
    main = tmp_path / "sweep.py"
    main.write_text(SWEEP)
    out = tmp_path / "out"
    done = te_bench("run", "naps", "--device", "cpu", "--out", out, main=main, env=IDLE, timeout=30)
    assert (done.returncode, len(rows(out))) == (130, 0), done


PRELOADING = """
import signal
from te_bench.experiments import fork_server_preload
import interrupted
assert interrupted.REACHED
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
"""


def test_a_ctrl_c_while_the_fork_server_imports_is_te_benchs(tmp_path: Path) -> None:
    """Else the server would print where it was."""
    (tmp_path / "interrupted.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\nREACHED = True\n")
    more = {"TE_BENCH_RUNNER": str(os.getpid()), "TE_BENCH_PRELOADED": "interrupted"}
    path = os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))
    done = subprocess.run(
        [sys.executable, "-c", PRELOADING],
        env={**os.environ, **more, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
