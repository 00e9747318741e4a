"""Descriptions of the manifest: its CRD, `dovetail explain` and the reference page."""
