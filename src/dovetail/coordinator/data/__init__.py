"""The data of a job: sources, blending, splits, tokenization, and the built-in synthetic dialogue language."""
