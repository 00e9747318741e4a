"""Simulates iterations event by event: generation and scoring with inter-stage fusion, training, and lags."""
