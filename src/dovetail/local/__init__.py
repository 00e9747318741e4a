"""One machine: a launcher for a job's processes, the Python API, the report and the chat."""
