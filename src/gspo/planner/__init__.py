"""`gspo plan`: how long a step takes on hardware that is not here, by a simulation of the asynchronous pipeline."""
