"""Judges whether a run is well, and says why it failed."""
