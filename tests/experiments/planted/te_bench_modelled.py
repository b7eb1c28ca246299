"""te_bench_planted.py whose children find the models imported, as all of te-bench's do on a CPU."""

import te_bench_planted

from te_bench import cli
from te_bench.experiments import runner

runner.MODELS = te_bench_planted.MODELS

if __name__ == "__main__":
    cli.main()
