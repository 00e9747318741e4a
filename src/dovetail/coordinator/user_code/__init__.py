"""Processes that run a user's Python code: reward functions and environments. They may die, hang, and start others."""
