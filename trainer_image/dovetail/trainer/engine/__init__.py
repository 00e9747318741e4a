"""The state of a rank and the operations on it: stages, optimizers, schedules, checkpoints and exports."""
