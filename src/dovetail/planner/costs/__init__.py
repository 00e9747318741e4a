"""Cost models: seconds and memory of tasks. `gpu` is that of GPUs, `cpu` that of CPUs that all processes share."""
