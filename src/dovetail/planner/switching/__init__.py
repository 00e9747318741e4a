"""Layouts and routing tables, which the planner shares with the trainer ranks: `dovetail.protocol.weights`."""

from dovetail.protocol.weights import Box, Layout, LayoutError, RoutingTable, Tensor, Transfer, layer_range, route

__all__ = ["Box", "Layout", "LayoutError", "RoutingTable", "Tensor", "Transfer", "layer_range", "route"]
