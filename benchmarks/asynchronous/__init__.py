"""Parts of bench_async.py."""
