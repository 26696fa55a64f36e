"""Vision-language models: `processor` turns text and images into tokens, `tower` runs the vision part of a model."""
