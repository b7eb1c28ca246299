"""Suites, a file each: `experiment(options) -> Experiment`. `list suites` shows the first line of each docstring."""
