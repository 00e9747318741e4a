"""The coordinator of a job. It prepares data, draws and scores samples, trains, sends weights and writes checkpoints.
It does not import torch."""
