"""The fleet: which rollouts and scorers exist, and which of them may take work."""
