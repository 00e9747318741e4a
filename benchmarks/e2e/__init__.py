"""Parts of bench_e2e."""
