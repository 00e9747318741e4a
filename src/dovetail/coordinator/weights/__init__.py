"""Sends new weights from the trainers to rollouts and scorers."""
