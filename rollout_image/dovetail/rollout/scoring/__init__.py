"""The scorer: forward passes of reference, reward model and critic."""
