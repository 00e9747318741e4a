"""What a pod of a job starts."""
