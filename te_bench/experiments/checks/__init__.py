"""What is right: results held to a reference in float64, and what ran to what was asked for."""
