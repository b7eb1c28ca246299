"""What one trial does, a file each: `run(trial, context) -> Measurement`."""
