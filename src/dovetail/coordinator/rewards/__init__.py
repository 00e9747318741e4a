"""Reward functions: called in worker processes as samples finish, with a deadline, checked and tried again."""
