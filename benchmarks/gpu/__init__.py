"""What `bench_gpu.py` measures, one file a group of figures."""
