"""`te-bench plan scaling`: how fast a model trains on more GPUs than the machine has. Arithmetic alone, no torch."""
