"""Scoring: the reference, the reward model and the critic score finished samples."""
