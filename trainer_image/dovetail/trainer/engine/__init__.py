"""The state of a rank and the operations on it. These are stages, optimizers, schedules, checkpoints and exports."""
