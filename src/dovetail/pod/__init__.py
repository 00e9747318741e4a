"""Starts the processes of one pod."""
