"""Reward functions. Worker processes call them as samples finish, with a deadline. Results are checked, and failed
calls are repeated."""
