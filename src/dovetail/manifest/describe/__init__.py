"""Describes the manifest in its CRD, `dovetail explain` and the reference page."""
