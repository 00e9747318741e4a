"""Memory of GPUs: cases, how the null GPU measures them, and what the planner says."""
