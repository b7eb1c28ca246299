"""`te-bench plan scaling`: predict how fast a model trains on more GPUs than are present. Pure calculation, no torch."""
