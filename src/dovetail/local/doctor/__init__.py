"""Checks for `dovetail doctor`: whether a machine can run jobs, and how to repair it if not."""
