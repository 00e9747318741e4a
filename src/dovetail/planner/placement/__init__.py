"""Which task of an iteration runs on which GPUs, in which layout (APP section V)."""
