"""Runs jobs on one machine: the launcher of a job's processes, the Python API, the report and the chat."""
