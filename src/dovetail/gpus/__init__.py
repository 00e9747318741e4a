"""What a process must know about its GPUs before it uses them: their dtypes, and whether torch has kernels for them."""
