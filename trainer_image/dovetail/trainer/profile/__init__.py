"""Measured times of models and of messages on this machine. `dovetail profile` writes them."""

from dovetail.trainer.profile.links import measure_link
from dovetail.trainer.profile.pass_times import hardware_toml, measure_model

__all__ = ["hardware_toml", "measure_link", "measure_model"]
