"""Generation: samples are drawn on rollout servers."""
