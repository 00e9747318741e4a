"""The environment, name, heartbeat file and exit codes of every process of a job."""
