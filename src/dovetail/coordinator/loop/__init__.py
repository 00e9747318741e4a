"""The training loop: it decides in which order samples are drawn, scored and trained on, and when weights are
published."""
