"""What a process must know of its GPUs before it uses them: what they compute with, and whether torch has kernels for
them."""
