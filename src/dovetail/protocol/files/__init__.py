"""The files of a run that several processes read or write."""
