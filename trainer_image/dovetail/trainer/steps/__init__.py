"""One module for each stage: from a batch to losses, optimizer steps and metrics."""
