"""Plans the transfer of weights from one layout to another (PUZZLE section 5.2). The plan says which rank sends which
part of a tensor to which ranks. The functions are pure.

PUZZLE's Algorithm 1 is right only for equal dp and equal pp x tp. Here a layout gives each rank a set of N-dimensional
boxes, and the routing table has the overlaps of these boxes. So any pair of layouts works. The planner uses it to
compare layouts, and trainer ranks use it to send weights."""

from dovetail.protocol.weights.layout import Box, LayoutError, RankGrid, Tensor, layer_range
from dovetail.protocol.weights.routing import RoutingTable, Transfer, route

__all__ = ["Box", "LayoutError", "RankGrid", "RoutingTable", "Tensor", "Transfer", "layer_range", "route"]
