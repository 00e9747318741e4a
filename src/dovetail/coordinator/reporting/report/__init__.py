"""Makes a run's report and the figures in it."""
