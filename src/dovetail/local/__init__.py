"""The Python API: jobs and models on this machine."""
