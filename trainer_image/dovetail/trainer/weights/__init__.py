"""Keeps weight versions, compares weights, and computes log-probabilities that show whether a server has the right
ones."""
