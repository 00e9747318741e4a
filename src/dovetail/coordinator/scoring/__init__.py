"""Scores finished samples with the reference, the reward model and the critic."""
