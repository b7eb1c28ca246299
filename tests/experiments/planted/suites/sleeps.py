"""One trial."""
from te_bench.experiments.spec import Experiment, Options, Trial

def experiment(options: Options) -> Experiment:
    return Experiment(suite="sleeps", title="t", trials=(Trial(workload="doze", device="cpu", problem={"s": 60}, attention="manual"),))
