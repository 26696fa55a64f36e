"""`gspo bench`: time and memory of this trainer and of TRL's on the same workloads."""
