"""Data: sources, blending and splits, tokenization, the built-in dialogue language."""
