"""Layouts and routing tables, which the planner shares with the trainer ranks: `dovetail.api.switching`."""

from dovetail.api.switching import Box, Layout, LayoutError, RoutingTable, Tensor, Transfer, layer_range, route

__all__ = ["Box", "Layout", "LayoutError", "RoutingTable", "Tensor", "Transfer", "layer_range", "route"]
