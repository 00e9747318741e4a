"""Files that ranks write together, and how they are read again."""
