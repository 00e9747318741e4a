"""Samples drawn on rollout servers."""
