"""The pipeline schedules that the trainers run."""
