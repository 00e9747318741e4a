"""Starts a job's processes, watches them, and restarts those that die."""
