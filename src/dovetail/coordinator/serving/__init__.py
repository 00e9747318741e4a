"""Serves the job's other processes over HTTP."""
