"""te-bench with the tests' own workloads and suites beside its own: python tests/experiments/planted/te_bench_planted.py run faults --out DIR.

The fork server imports the main module before it forks, so this reaches the children too.
"""

from pathlib import Path

from te_bench import cli
from te_bench.experiments import suites, workloads

HERE = Path(__file__).resolve().parent
workloads.__path__.append(str(HERE / "workloads"))
suites.__path__.append(str(HERE / "suites"))

if __name__ == "__main__":
    cli.main()
