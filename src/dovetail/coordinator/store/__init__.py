"""Keeps the data of a run on its disk."""
