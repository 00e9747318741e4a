"""Sends a run's metrics and timelines to trackers such as W&B and MLflow, each from a process of its own."""
