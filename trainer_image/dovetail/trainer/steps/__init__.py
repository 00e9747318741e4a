"""One module for each stage. It goes from a batch to losses, optimizer steps and metrics."""
