"""What a rank holds and does: stages, optimizers, schedules, checkpoints and exports."""
