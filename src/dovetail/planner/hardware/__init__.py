"""GPUs by product: what they can do, from data sheets (`gpus.toml`) or measured in the same format."""

from dovetail.planner.hardware.gpus import GPU, HardwareError, UnknownProduct, gpu, parse, products

__all__ = ["GPU", "HardwareError", "UnknownProduct", "gpu", "parse", "products"]
