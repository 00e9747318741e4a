"""Drives a job: data, samples, fleet, iterations, weights, checkpoints. No torch."""
