"""te-bench with the tests' own suites and workloads beside its own: python te_bench_planted.py run faults --out DIR.

The fork server imports the main module before it forks, so the planted workloads are there in the children too.
"""

from pathlib import Path

from te_bench import cli
from te_bench.experiments import runner, suites, workloads

HERE = Path(__file__).resolve().parent
suites.__path__.append(str(HERE / "suites"))
workloads.__path__.append(str(HERE / "workloads"))
runner.PROFILER = ()  # no planted trial profiles, and a second to import
MODELS, runner.MODELS = runner.MODELS, ()  # and one has a model, another second

if __name__ == "__main__":
    cli.main()
