"""torch's compiler, whose import takes nearly as long as torch's own, is told of te_bench's functions once it is there."""

import subprocess
import sys

PROGRAM = """
import sys

import te_bench.models.conversion
import te_bench.models.zoo.gpt
from te_bench.kernels import compiler

early = "torch._dynamo" in sys.modules
told = []
compiler.when_imported(lambda: told.append("waited"))
import torch._dynamo

compiler.when_imported(lambda: told.append("at once"))
print(early, *told)
"""


def test_models_do_not_import_it_and_it_is_told_of_them_once_something_else_does() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.stdout == "False waited at once\n", done.stderr
