"""Settings, baselines and published figures of APP, PUZZLE and RLHFuse, for `make bench-papers`."""
