"""Describes GPUs by product. The figures come from data sheets (`gpus.toml`), or were measured in the same format."""
