"""Metrics, events and timelines of a run."""
