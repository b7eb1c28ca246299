"""te-bench whose trainings are simulated: python te_bench_simulated.py run convergence --data random ...

The folder `simulated` stands before te-bench's own workloads, so its training.py runs in their place.
"""

from pathlib import Path

from te_bench import cli
from te_bench.experiments import runner, workloads

workloads.__path__.insert(0, str(Path(__file__).resolve().parent / "simulated"))
runner.PROFILER = runner.MODELS = ()  # no simulated training profiles or has a model, and seconds to import

if __name__ == "__main__":
    cli.main()
