"""A run's report and its figures."""
