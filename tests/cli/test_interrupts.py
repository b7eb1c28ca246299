"""Ctrl-C where Python itself drops it."""

import subprocess
import sys

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
