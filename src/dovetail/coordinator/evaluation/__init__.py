"""Evaluates the weights, and keeps the best ones."""
