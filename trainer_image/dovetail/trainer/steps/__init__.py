"""One module a stage: from a batch to losses, optimizer steps and metrics."""
