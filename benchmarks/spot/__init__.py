"""Parts of bench_spot."""
