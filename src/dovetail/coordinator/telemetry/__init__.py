"""The metrics, events and timelines of a run."""
