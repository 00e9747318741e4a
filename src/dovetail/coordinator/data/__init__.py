"""The data of a job. It has sources, blending, splits, tokenization, and the built-in synthetic dialogue language."""
