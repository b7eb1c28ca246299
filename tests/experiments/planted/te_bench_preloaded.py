"""te-bench whose children find the layer's workload imported, as on a CPU they may: python te_bench_preloaded.py run layer

Each of them takes 2 s for it otherwise.
"""

from te_bench import cli
from te_bench.experiments import runner

runner.PROFILER = (*runner.PROFILER, "te_bench.experiments.workloads.layer")

if __name__ == "__main__":
    cli.main()
