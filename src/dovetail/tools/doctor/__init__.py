"""The checks of `dovetail doctor`. They find out whether a machine can run jobs, and say how to repair it."""
