"""What a run keeps on its disk."""
