"""The processes that work for the coordinator: rollouts and scorers (the fleet), trainer ranks, and their weights."""
