"""Models and data sets of a hub, and the folders of models."""
