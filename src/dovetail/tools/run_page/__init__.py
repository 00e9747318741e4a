"""The server of `dovetail ui`."""
