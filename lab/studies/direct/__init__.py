"""Studies that measure gradients and ratios directly, seed by seed, instead of comparing training runs."""
