"""Renders the children of a job as plain objects. Each kind has a file."""
