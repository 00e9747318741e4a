"""The `dovetail` command."""
