"""The children of a job, as plain objects: pure functions, one file a kind."""
