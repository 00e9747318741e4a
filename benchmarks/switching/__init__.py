"""Parts of bench_switch.py."""
