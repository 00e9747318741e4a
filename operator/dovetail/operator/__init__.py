"""The operator. It turns RLHFJobs into Kubernetes objects and reports their state."""
