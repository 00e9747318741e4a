"""Code that the HTTP servers of all processes share."""
