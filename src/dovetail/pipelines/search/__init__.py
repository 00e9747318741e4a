"""The search for the best schedule of a family."""
