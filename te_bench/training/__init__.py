"""Training a decoder: its data, one optimisation step in every execution mode, checkpoints, weights and evaluations."""
