"""Operators in C for sampling on a CPU: products of few rows, and layers of a decode step."""
