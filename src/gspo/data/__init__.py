"""Prompts from files, hub data sets and procedural tasks: loading, rendering, splitting and order."""
