"""The process groups of the trainer ranks."""
