"""The manifest described: its CRD, `dovetail explain` and the reference page."""
