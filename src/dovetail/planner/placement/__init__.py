"""Decides which task of an iteration runs on which GPUs, and in which layout (APP section V)."""
