"""Describes GPUs by product. The figures come from data sheets (`gpus.toml`), or were measured in the same format."""

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
