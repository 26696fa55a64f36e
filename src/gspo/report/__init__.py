"""What a run directory shows: summary, plot, page, live page. Reads files, not torch; training never imports it."""
