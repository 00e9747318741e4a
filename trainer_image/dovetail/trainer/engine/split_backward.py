"""Splits a backward pass into two halves. The first computes the gradient of a stage's input. The second computes those
of its weights later.

torch's own pipelines have private functions for this. They walk the graph several times, and ask autograd for each
weight by itself. Here one walk finds all weights, and one call of autograd computes the gradients of all weights of
equal depth."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

_NOTHING: frozenset[Node] = frozenset()
_NO_NODES: list[Node] = []  # of a node that is in its place


@dataclass
class WeightGroup:
    """Weights whose gradients are computed together. At `nodes` their branches leave the way from the output to the
    input. `leaves` are autograd's nodes of the weights. `gradients` maps a node to the gradients that reached it in the
    first half. `repeated` says that some weight has several nodes. `graph` keeps `nodes` usable."""

    nodes: list[Node]
    leaves: list[Node]
    gradients: list[tuple[Tensor | None, ...] | None] = field(default_factory=list)
    repeated: bool = False
    graph: GradientEdge | None = None


def backward_input(output: Tensor, gradient: Tensor | None, inputs: Tensor) -> tuple[Tensor | None, list[WeightGroup]]:
    """Compute the first half. Returns the gradient of `inputs`, a leaf, and the groups that `backward_weights` needs.
    `gradient` is that of `output`, or None for ones. `output` is detached, which frees what only its graph held."""
    start = output.grad_fn
    if start is None:
        return None, []
    groups = _weight_groups(start, inputs)
    handles = []
    for group in groups:
        group.gradients = [None] * len(group.nodes)
        for index, node in enumerate(group.nodes):
            handles.append(node.register_prehook(_kept(group, index)))
    try:
        given = torch.ones_like(output) if gradient is None else gradient
        (found,) = torch.autograd.grad(output, inputs, given, retain_graph=True, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    # Up to torch 2.11 the node of a function written in Python does not keep its part of the graph.
    if any(isinstance(node, BackwardCFunction) for group in groups for node in group.nodes):
        whole = get_gradient_edge(output)
        for group in groups:
            group.graph = whole
    output.detach_()
    return found, groups


def backward_weights(groups: Sequence[WeightGroup]) -> None:
    """Compute the second half. It adds the gradients of all weights to their `grad`. The graph is free afterwards."""
    for group in groups:
        edges, given = [], []
        for node, gradients in zip(group.nodes, group.gradients, strict=True):
            for number, each in enumerate(gradients or ()):
                if each is not None:
                    edges.append(GradientEdge(node, number))
                    given.append(each)
        handles = []
        if group.repeated:
            # One of the nodes may lead to another. A gradient that has passed already must not be counted again there.
            handles = [
                node.register_prehook(lambda _, kept=gradients: kept)
                for node, gradients in zip(group.nodes, group.gradients, strict=True)
            ]
        leaves = [GradientEdge(leaf, 0) for leaf in group.leaves]
        try:
            found = torch.autograd.grad(edges, leaves, given, retain_graph=group.repeated) if edges else ()
        finally:
            for handle in handles:
                handle.remove()
        for leaf, gradient in zip(group.leaves, found, strict=bool(found)):
            weight: Tensor = leaf.variable  # type: ignore[attr-defined]
            if weight.grad is None:
                weight.grad = gradient
            else:
                weight.grad += gradient
        group.nodes, group.gradients, group.graph = [], [], None


def _kept(group: WeightGroup, index: int) -> Any:
    def hook(gradients: tuple[Tensor | None, ...]) -> None:
        group.gradients[index] = gradients

    return hook


def _weight_groups(start: Node, inputs: Tensor) -> list[WeightGroup]:
    """The groups of weights that `start` leads to.

    A node is on the way if it leads to `inputs`. Its depth counts the nodes on the way below it from which branches to
    weights leave. Of two nodes of equal depth none leads to the other. So one call of autograd can start from both and
    computes no gradient twice. A weight with several nodes has a call of its own, together with all weights that share
    one of these nodes."""
    depth: dict[Node, int] = {}  # the depth of each node on the way
    below: dict[Node, frozenset[Node]] = {}  # the weights to which each node off the way leads
    leaving: dict[Node, frozenset[Node]] = {}  # the weights of the branches that leave at each node on the way
    for node, children in _children_first(start):
        if not children:
            variable = getattr(node, "variable", None)
            if variable is inputs:
                depth[node] = 0
            elif variable is not None:
                below[node] = frozenset((node,))
            continue
        deepest, branches = -1, _NOTHING
        for child in children:
            if child in depth:
                deepest = max(deepest, depth[child])
            elif child in below:
                branches = branches | below[child] if branches else below[child]
        if deepest >= 0:
            depth[node] = deepest + bool(branches)
            if branches:
                leaving[node] = branches
        elif branches:
            below[node] = branches
    uses: dict[Node, list[Node]] = defaultdict(list)
    for node, leaves in leaving.items():
        for leaf in leaves:
            uses[leaf].append(node)
    groups: dict[int, WeightGroup] = {}
    shared: list[tuple[set[Node], set[Node]]] = []  # nodes and weights
    for node, leaves in leaving.items():
        if all(len(uses[leaf]) == 1 for leaf in leaves):
            group = groups.setdefault(depth[node], WeightGroup([], []))
            group.nodes.append(node)
            group.leaves += leaves
            continue
        nodes, weights = {node}, set(leaves)
        for other in [other for other in shared if not other[1].isdisjoint(weights)]:
            shared.remove(other)
            nodes, weights = nodes | other[0], weights | other[1]
        shared.append((nodes, weights))
    # The way between nodes of such a weight passes nodes of other groups, and these free what they used.
    repeated = [WeightGroup(list(nodes), list(weights), repeated=True) for nodes, weights in shared]
    return [*repeated, *groups.values()]


def _children_first(start: Node) -> list[tuple[Node, list[Node]]]:
    """All nodes to which `start` leads, each with the nodes to which it leads directly. A node comes after these."""
    found: dict[Node, list[Node]] = {}
    order: list[tuple[Node, list[Node]]] = []
    stack = [start]
    while stack:
        node = stack[-1]
        if node in found:
            stack.pop()
            children = found[node]
            if children is not _NO_NODES:
                order.append((node, children))
                found[node] = _NO_NODES
            continue
        found[node] = children = [child for child, _ in node.next_functions if child is not None]
        stack += [child for child in children if child not in found]
    return order
