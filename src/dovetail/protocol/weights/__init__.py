"""From one layout to another (PUZZLE section 5.2): which rank sends which part of a tensor to whom. Pure.

PUZZLE's Algorithm 1 is right only for equal dp and equal pp x tp. Here a layout is a set of N-dimensional boxes a rank,
and a routing table their overlaps, so any pair of layouts will do. The planner weighs layouts by it, trainer ranks
send weights by it."""

from dovetail.protocol.weights.layout import Box, LayoutError, RankGrid, Tensor, layer_range
from dovetail.protocol.weights.routing import RoutingTable, Transfer, route

__all__ = ["Box", "LayoutError", "RankGrid", "RoutingTable", "Tensor", "Transfer", "layer_range", "route"]
