"""What a log of the tests ends with: a failure's whole reason, in a terminal of any width."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = """
import gc

def test_whose_name_alone_is_longer_than_a_line_of_the_summary_so_that_no_room_is_left_for_its_reason():
    assert not "found", "the first line\\n" + "\\n".join(f"line {i}" for i in range(500)) + "\\nthe last line"


class Broken:
    def __del__(self):
        raise KeyError("what an older test left")


def test_unraisable():
    Broken()


def test_sound():
    pass
"""


def test_a_failure_s_reason_is_whole_and_last(tmp_path: Path) -> None:
    (tmp_path / "test_two.py").write_text(TESTS)
    paths = [str(Path(__file__).parent), os.environ["PYTHONPATH"]]
    for alone in (["-n", "0"], ["-n", "1"]):
        options = ["-p", "conftest", "-q", "-W", "error::pytest.PytestUnraisableExceptionWarning", *alone]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, "test_two.py"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "80", "CI": ""},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 1, done.stdout + done.stderr
        end = done.stdout[-5000:]
        assert "for_its_reason, call:\nAssertionError: the first line\n" in end
        assert "line 499\n  the last line\n" in end
        assert "test_unraisable, call:" in end
        assert "KeyError: 'what an older test left'" in end
        assert "test_sound" not in end
