"""Files that ranks write together, and the readers of these files."""
