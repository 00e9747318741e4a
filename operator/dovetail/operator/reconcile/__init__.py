"""Decides what to do for one job, from all that is seen of it. Pure."""
