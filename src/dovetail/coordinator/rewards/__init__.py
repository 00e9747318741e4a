"""Reward functions. They are called in worker processes as samples finish, with a deadline; answers are checked, and
failed calls are repeated."""
