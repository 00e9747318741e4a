"""What the HTTP servers of all processes share."""
