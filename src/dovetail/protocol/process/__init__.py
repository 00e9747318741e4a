"""What every process of a job needs: its environment, its name, its signs of life, its exit codes."""
