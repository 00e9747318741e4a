"""Weights that a rank keeps, compares and proves."""
