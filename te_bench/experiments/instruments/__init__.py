"""Readings of a run besides its times: kernels, compilations, FP8 numerics, memory, energy, communication."""
