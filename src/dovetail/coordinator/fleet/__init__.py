"""The fleet. It knows which rollouts and scorers exist, and which of them may take work."""
