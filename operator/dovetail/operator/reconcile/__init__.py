"""Decides what to do for one job, from everything that is known of it."""
