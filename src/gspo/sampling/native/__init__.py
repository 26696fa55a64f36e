"""Products of few rows in C, for sampling on a CPU."""
