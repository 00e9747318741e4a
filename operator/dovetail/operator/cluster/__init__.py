"""Reads the state of the cluster for the operator, and writes to it."""
