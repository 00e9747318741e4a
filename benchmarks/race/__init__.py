"""Parts of bench_race."""
