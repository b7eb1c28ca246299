"""Sweeps, a file each: `experiment(options) -> Experiment`. The first line of its docstring is what `list suites` shows."""
