"""Samples scored by reference, reward model and critic."""
