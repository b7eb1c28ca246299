"""torch's compiler takes nearly as long to import as torch itself."""

import subprocess
import sys

PROGRAM = """
import sys

import te_bench.models.conversion
import te_bench.models.zoo.gpt

print("torch._dynamo" in sys.modules)
"""


def test_models_do_not_import_it() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.stdout == "False\n", done.stderr
