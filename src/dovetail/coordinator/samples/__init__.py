"""Samples from prompt to score: drawn on rollout servers, scored by models, gathered, evaluated."""
