"""The operator: turns RLHFJobs into Kubernetes objects and reports what becomes of them."""
