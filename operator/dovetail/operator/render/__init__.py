"""Renders the children of a job as plain objects. All functions are pure, and each kind has a file."""
