"""What a manifest must satisfy, and in which words it is told."""
