"""A trainer rank: algorithms, executor, parallelism, checkpoints and weight sending."""
