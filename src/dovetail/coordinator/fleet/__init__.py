"""Which rollouts and scorers there are."""
