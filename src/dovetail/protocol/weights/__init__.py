"""The transfer of weights from trainer ranks to receivers: who holds which part, and what each rank sends."""

from dovetail.protocol.weights.layout import LayoutError, layer_range

__all__ = ["LayoutError", "layer_range"]
