"""The messages, files and names that the processes of a job share."""
