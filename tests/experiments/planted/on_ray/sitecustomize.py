"""In every Python process: a torch that is none, two GPUs that are none, and the tests' own suites and workloads.

Workers of Ray do not run the main module that plants them elsewhere.
"""

import os
import runpy
from pathlib import Path

PLANTED = Path(__file__).resolve().parents[1]
runpy.run_path(str(PLANTED / "without_torch" / "sitecustomize.py"))

from te_bench.experiments import environment, suites, workloads  # noqa: E402  # by then torch must be the other one

suites.__path__.append(str(PLANTED / "suites"))
workloads.__path__.append(str(PLANTED / "workloads"))

GPU = {"name": "Pretended", "driver": os.environ.get("PRETENDED_DRIVER", "1")}
environment.nvidia_gpus = lambda: [{**GPU, "index": i, "uuid": f"GPU-{i}"} for i in range(2)]
environment.no_cuda = lambda: None
if code := os.environ.get("PRETENDED_CODE"):
    environment.code_hash = lambda: code
