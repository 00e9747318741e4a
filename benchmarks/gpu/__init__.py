"""The measurements of `bench_gpu.py`. Each file has one group of figures."""
