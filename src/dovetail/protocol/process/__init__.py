"""What every process of a job needs: its environment, its name, its heartbeat file and its exit codes."""
