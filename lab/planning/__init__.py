"""Is `gspo plan` right? Predicted against measured on this machine, and how the system scales where it was not run."""
