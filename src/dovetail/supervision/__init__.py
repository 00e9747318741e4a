"""Processes that are started, watched and started again."""
