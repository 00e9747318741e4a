"""Starts a job's processes on this machine, and follows their progress."""
