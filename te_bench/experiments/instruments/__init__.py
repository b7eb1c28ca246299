"""What is read off a run besides its times: kernels, compilations, FP8 numerics, memory."""
