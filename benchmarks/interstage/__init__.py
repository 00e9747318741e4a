"""Parts of bench_interstage."""
