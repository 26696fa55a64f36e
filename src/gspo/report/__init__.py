"""What a run directory shows: summary, plot. Reads files alone, starts without torch, and training never imports it."""
