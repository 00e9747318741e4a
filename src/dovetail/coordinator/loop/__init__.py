"""The training loop. It decides in which order samples are drawn, scored and trained on, and when weights are
published."""
