"""The search for the best placement on GPUs."""
