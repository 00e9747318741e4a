"""New weights for rollouts and scorers."""
