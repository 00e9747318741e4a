"""Draws samples on rollout servers."""
