"""Where prompts come from: files, hub data sets, procedural tasks; how they are rendered, split and ordered."""
