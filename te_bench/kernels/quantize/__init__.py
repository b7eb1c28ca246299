"""High precision -> FP8. `scale` multiplies towards FP8, `scale_inv` back: x is about data * scale_inv."""
