"""GPUs by product: what they can do, from data sheets (`gpus.toml`) or measured in the same format."""

from dovetail.planner.hardware.gpus import (
    GPU,
    HardwareError,
    UnknownProduct,
    described,
    estimate,
    gpu,
    is_known,
    parse,
    products,
    read,
)

__all__ = [
    "GPU",
    "HardwareError",
    "UnknownProduct",
    "described",
    "estimate",
    "gpu",
    "is_known",
    "parse",
    "products",
    "read",
]
