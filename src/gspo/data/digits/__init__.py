"""`embedded:digits`: images of handwritten numbers, and their sums as answers."""
